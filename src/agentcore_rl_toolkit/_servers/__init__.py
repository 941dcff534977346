"""What every server process shares: listening, who may ask, how many connections, keys, the end with its parent."""
