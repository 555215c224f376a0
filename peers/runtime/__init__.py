"""What any process of ours stands on: clock, timer, supervision, lock, control socket, HTTP."""
