"""Turn messages into bytes and back without I/O: frames, send queues, and partly received messages."""
