"""What a run's owner does with it: try it, order, invite, list, report."""
