"""Deployed agents, their versions and environments."""
