"""Command line: `agentcore-rl`. May import every part; nothing imports it."""
