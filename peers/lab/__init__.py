"""Tests and measurements of the product. No other package imports it."""
