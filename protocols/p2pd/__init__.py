"""The transport on p2pd: dialling, multipath links, chunk streams, and the speed test."""
