"""A visitor's requests, through the stages."""
