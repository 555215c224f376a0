"""A worker: one stage, held and trained."""
