"""The wire: frames, messages, signed envelopes, directory records, and the ports they travel through."""
