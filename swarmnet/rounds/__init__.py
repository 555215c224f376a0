"""The rounds of a group: whose contributions have weight, when a set is settled, and how a fork is
resolved."""
