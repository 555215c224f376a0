"""The microbatches on one peer: state machine, events, ledger, flow control and timeouts."""
