"""Which chunk of whom, which root to believe, and who signed which digest."""
