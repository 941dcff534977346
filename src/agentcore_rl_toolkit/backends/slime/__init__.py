"""slime: `SlimeRunner` launches it, `generate` runs its rollouts on remote agents. Needs slime only when it runs."""

from .runner import SlimeRunner

__all__ = ["SlimeRunner"]
