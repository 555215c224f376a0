"""What people type: peer file and run file, their checks with line numbers, and their explanation."""
