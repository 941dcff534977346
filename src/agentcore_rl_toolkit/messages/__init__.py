"""Messages between agents and models: the wire formats of agents, and the way to token ids and back. No network."""
