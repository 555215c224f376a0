"""Who is there: records, beats and silence, whom to dial, and the overlay of a large group."""
