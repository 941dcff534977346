"""`agentcore-rl quickstart`: every part of the system on one machine, training the math agent of the examples."""

from .command import command

__all__ = ["command"]
