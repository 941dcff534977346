"""How old the sessions are that were closed before this process started: only the wall clock's times are known of them."""

from __future__ import annotations

from collections.abc import Sequence

_STILL = 0.25  # of the bound: what a gap that is longer than the bound counts for


def ages(closed_s: Sequence[float], now_s: float, bound_s: float | None) -> list[float]:
    """How old sessions are that were closed at these times, in their order, by the wall clock.

    The gaps between them, and from the last one to now, are added up. A clock that was set back makes a gap of nothing. A
    gap longer than the bound may be a clock that was set forward, or a store that nobody used: it counts as a quarter of the
    bound, so that a step deletes nothing that is younger than the other three, and a store that lies still again and
    again is cleared all the same.

    Shapes: (S,) -> (S,).   Units: unix seconds -> seconds.
    """
    found: list[float] = []
    age_s, after_s = 0.0, now_s
    for at_s in reversed(closed_s):
        gap_s = max(0.0, after_s - at_s)
        age_s += gap_s if bound_s is None or gap_s <= bound_s else bound_s * _STILL
        found.append(age_s)
        after_s = at_s
    return found[::-1]
