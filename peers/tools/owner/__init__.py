"""Tools for the owner of a run: check, order, invite, list, report."""
