"""What people type: the peer file, its checks with line numbers, and its explanation."""
