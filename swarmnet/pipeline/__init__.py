"""A microbatch on one peer: the machine, its events, the ledger, flow control and timeouts."""
