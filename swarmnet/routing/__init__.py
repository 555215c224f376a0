"""Which peer next: the load balancer, and for runs that skip, reservations and the cheapest path."""
