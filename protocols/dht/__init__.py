"""Store and find signed records in hivemind's Kademlia DHT. Every record is verified before it is kept."""
