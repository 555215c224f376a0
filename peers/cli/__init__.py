"""The command line, one file for each family of commands; heavy imports only where a command needs them."""
