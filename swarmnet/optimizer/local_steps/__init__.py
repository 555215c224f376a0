"""Methods whose peers step by themselves between rounds, and what they tell of it."""
