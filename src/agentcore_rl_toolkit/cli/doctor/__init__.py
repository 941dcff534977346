"""`agentcore-rl doctor`: is everything there that the toolkit needs here, or on AWS?"""

from .command import command

__all__ = ["command"]
