"""What every server process shares: listening, who may ask, how many connections, keys, what the kernel says of processes."""
