"""What every server process shares: listening, names it answers to, keys, signatures, ready files."""
