"""Text from live peers: who asks, who answers, and the commands of a visitor."""
