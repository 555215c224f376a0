"""What a swarm could carry: discrete events, stubbed compute, and the real routing decisions."""
