"""Messages as bytes, without IO: frames, queues of a link, and what is not whole yet."""
