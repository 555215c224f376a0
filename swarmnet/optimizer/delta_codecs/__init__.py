"""Delta codecs of methods with local steps, and the robust sum of deltas."""
