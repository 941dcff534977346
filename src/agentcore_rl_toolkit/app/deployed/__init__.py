"""Agents as they are deployed: their model calls go to the gateway in a rollout, and their answers are stored."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..._lazy import lazy

if TYPE_CHECKING:
    from .program import Program as Program
else:
    __all__, __getattr__, __dir__ = lazy(__name__)
