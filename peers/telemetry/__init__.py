"""What a peer tells: events and their reasons, metrics, the console, the picture of a peer."""
