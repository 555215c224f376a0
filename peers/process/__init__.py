"""The operating system process of a peer: its sessions with p2pd, and the interface of its role."""
