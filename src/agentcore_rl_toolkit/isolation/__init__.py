"""Isolation tiers for session processes. The contract with a launcher is in `tiers`."""

from __future__ import annotations

from .spec import IsolationSpec, Limits
from .tiers import Tier, TierReport, available_tiers, choose_tier

__all__ = ["IsolationSpec", "Limits", "Tier", "TierReport", "available_tiers", "choose_tier"]
