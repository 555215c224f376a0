"""Commands of a run's owner and moderators."""
