"""Find the other peers of a run, and announce this one."""
