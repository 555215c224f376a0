"""The rounds of a group: whose contributions have weight, when sets settle, and how forks are resolved."""
