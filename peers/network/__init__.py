"""The network as a peer lives in it: neighbours, their addresses and channels."""
