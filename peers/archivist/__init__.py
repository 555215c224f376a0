"""The archivist: keeps a run for the day on which all its peers are gone."""
