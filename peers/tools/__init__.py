"""Programs for users in addition to a running peer."""
