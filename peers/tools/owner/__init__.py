"""Tools of a run's owner: try, order, invite, list, report."""
