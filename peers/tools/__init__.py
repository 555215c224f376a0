"""What a person runs beside a peer."""
