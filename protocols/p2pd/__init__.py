"""The transport on p2pd: connect, multipath links, chunk streams, speed test."""
