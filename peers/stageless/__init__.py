"""Roles without a stage: the bootstrap here, observer and archivist in folders."""
