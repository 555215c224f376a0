"""Secure sums: votes with pairwise masks that cancel in the sum of a closed set of owners."""
