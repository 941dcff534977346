"""The common parts of all servers: listening, host names, keys, signatures, ready files, locks."""
