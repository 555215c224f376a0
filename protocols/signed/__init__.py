"""Peer identities, signed envelopes, and all documents that are signed."""
