"""Identities, envelopes, and every signed document."""
