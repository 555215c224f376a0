"""The command line, one file for each family of commands: parse, call, print."""
