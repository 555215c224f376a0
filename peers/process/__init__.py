"""The operating system process of a peer: its sessions with p2pd, and roles without a stage."""
