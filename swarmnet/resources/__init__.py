"""What a peer costs its machine (memory, bandwidth, time), and limits on what others may cost it."""
