"""Swarms of real processes on this computer: demo, fault injection, reports."""
