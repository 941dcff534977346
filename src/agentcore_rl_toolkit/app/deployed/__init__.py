"""Agents as they are deployed: their model calls go to the gateway in a rollout, and their answers are stored."""

from __future__ import annotations

from .program import Program

__all__ = ["Program"]
