"""The owner's orders, as a peer hears them and passes them on."""
