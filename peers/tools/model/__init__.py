"""Use the trained model: generate, evaluate and export, from live peers or from files."""
