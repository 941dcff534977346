"""Token mode: calls whose prompts the gateway renders."""
