"""The wire protocol: frames, messages, signed envelopes, DHT records, and the transport interfaces."""
