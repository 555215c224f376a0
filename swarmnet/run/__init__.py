"""What a run is: its manifest, the paths that it allows, and what its owner has ordered."""
