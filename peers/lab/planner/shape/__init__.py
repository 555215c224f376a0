"""Which shape of a run suits given peers: searched by arithmetic, the best few played, and written down."""
