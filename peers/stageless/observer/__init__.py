"""The observer: a peer without a stage that shows the whole swarm on a page, as JSON and as metrics."""
