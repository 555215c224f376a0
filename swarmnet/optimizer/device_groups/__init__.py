"""Contributions of a peer whose stage is divided among several devices."""
