"""AppWorld over HTTP: its server in a separate environment, and a client for one world."""
