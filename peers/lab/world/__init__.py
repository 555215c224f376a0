"""Moving between stages judged: a seeded trace of preemptions, a simulation of the rule, its bench."""
