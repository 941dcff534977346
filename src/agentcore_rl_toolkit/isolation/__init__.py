"""Keeps sessions from this user's files: the isolation tiers and their requirements."""
