"""The directory on hivemind's Kademlia; nothing enters it unverified."""
