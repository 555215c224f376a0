"""How the commands of a person reach the peer that runs: a Unix socket in its state folder."""
