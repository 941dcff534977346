"""The sessions of a gateway, and their settings."""
