"""The archive of a run: what it takes to go on when every peer is gone."""
