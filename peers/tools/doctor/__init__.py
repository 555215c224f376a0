"""`swarmnet doctor`: what keeps this machine from taking part, each with a fix."""
