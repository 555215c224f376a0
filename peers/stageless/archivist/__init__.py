"""The archivist: keeps a run available after all its peers are gone."""
