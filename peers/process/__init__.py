"""A peer's operating system process: its sessions with p2pd, and roles that hold no stage."""
