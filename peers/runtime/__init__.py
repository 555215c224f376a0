"""Basics of every process: clock, timer, supervision, lock, control socket, HTTP server."""
