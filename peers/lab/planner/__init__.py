"""What a swarm could carry: discrete events on the real pipeline and router."""
