"""Agents as they are deployed: their model calls go to the gateway in a rollout, and their answers are stored."""
