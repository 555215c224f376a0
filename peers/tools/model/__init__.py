"""The model: from live peers or at home, to generate, evaluate and export."""
