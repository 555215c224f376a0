"""Weights of votes by agreement: compare the contributors of settled rounds, and weigh later votes by it."""
