"""The core of swarmnet: decisions and mathematics, without IO.

It uses no clock, socket, thread, event loop, file or environment variable. Time is an argument in seconds,
and random numbers come from a seeded `random.Random`. A state machine here takes an event and the time, and
returns what the caller must do. The peer, the simulator and the tests therefore run the same code.
"""
