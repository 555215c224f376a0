"""Whether peers did the work that they say they did."""
