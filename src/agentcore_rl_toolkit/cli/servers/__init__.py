"""Commands that run a server: runtime, gateway, policy."""
