"""Run one p2pd process per peer. Only this package imports hivemind."""
