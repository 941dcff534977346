"""`agentcore-rl doctor`: does this machine, or the AWS account, have what the toolkit needs?"""

from .command import command

__all__ = ["command"]
