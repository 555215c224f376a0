"""What of a machine the swarm may have: hours, idleness. Memory is in fitting.py, upload in protocols/."""
