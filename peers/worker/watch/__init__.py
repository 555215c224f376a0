"""What a worker shows of itself: metrics, status line, snapshot, summary at the start, and a slow upload."""
