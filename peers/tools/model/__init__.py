"""Taking the model home: export with its card, generate, chat, evaluate."""
