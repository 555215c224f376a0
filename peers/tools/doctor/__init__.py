"""`swarmnet doctor`: find what keeps this machine from taking part, with a fix for each problem."""
