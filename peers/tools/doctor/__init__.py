"""`swarmnet doctor`: what on this machine and its line keeps it from taking part, each with the fix."""
