"""The core of swarmnet: it decides and it calculates.

No clock, socket, thread, event loop, file or environment is known here. Time is an argument in
seconds, chance is a seeded `random.Random`. State machines take an event and the time and return
what the caller must now do, so that the peer, the simulator and the tests drive the same code.
"""
