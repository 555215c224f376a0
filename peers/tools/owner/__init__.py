"""What a run's creator does with it: orders, invites, the registry, the report."""
