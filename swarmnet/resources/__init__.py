"""What it costs a machine: memory, bandwidth, hours, idleness, and what strangers may take of it."""
