"""The version of the toolkit."""

from __future__ import annotations

from importlib.metadata import version

__version__ = version("agentcore-rl-toolkit")
