"""Downloads of snapshots: which chunk to ask of which peer, which root to trust, and signed digests."""
