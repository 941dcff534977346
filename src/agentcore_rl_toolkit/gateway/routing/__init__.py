"""The inference servers: which of them takes a call, connections to them, outages, and pauses for new weights."""
