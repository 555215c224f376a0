"""Taking the model home: export, generate, evaluate."""
