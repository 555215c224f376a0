"""What a peer process can be: each role lives as long as the process and runs once in every session."""
