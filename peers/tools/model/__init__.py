"""The model: from live peers or at home, to generate, chat, evaluate and export."""
