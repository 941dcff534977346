"""The weight versions of a choice's tokens: those that the engine names, else the gateway's bounds.

An engine that names a version is believed, choice by choice. A version in an event without tokens belongs to a moment without
sampling, so it counts only if no other event names one.

Without a named version there are bounds only: the versions that were published when the call was sent and when its reply was
whole. Every token then counts as sampled by the older one, so that it is never taken for younger than it is.
"""

from __future__ import annotations

from collections.abc import Iterable

from .record import Captured


def version_of(value: int | str | None) -> int | None:
    """A weight version that is a number; engines also say "default"."""
    if isinstance(value, str):
        return int(value) if value.isdigit() else None
    return value


class Versions:
    """The versions that an engine named for one choice."""

    __slots__ = ("_aside", "first", "last", "whole")

    def __init__(self) -> None:
        self.first: int | None = None
        self.last: int | None = None
        self.whole = False  # whether both ends were named, not only that of one moment
        self._aside = False  # whether that came beside no tokens

    def named(self, version: int, *, tokens: bool) -> None:
        """The engine names a version beside some tokens of the choice, or beside none."""
        if self.whole or (self.first is not None and not tokens and not self._aside):
            return
        if self.first is None or (tokens and self._aside):
            self.first = version
        self.last = version
        self._aside = not tokens

    def spans(self, first: int | None, last: int | None) -> None:
        """The engine names the versions of the first and the last token, whatever it named on the way."""
        if first is not None and last is not None:
            self.first, self.last, self.whole = first, last, True


def put(captured: Captured, found: Iterable[Versions]) -> None:
    """Write what was named of its choices, in their order, into a capture."""
    for choice, versions in zip(captured.choices, found, strict=True):
        choice.weight_version_first, choice.weight_version_last = versions.first, versions.last
        captured.first_named = captured.first_named or versions.whole
    firsts = [c.weight_version_first for c in captured.choices if c.weight_version_first is not None]
    lasts = [c.weight_version_last for c in captured.choices if c.weight_version_last is not None]
    if firsts and lasts:
        captured.weight_version_first, captured.weight_version_last = min(firsts), max(lasts)


def bounds(
    captured: Captured, begun: int | None, ended: int | None, *, changed: bool, stream: bool
) -> tuple[int | None, int | None]:
    """The versions at the first and the last token of a call; what its choices say is adjusted to it.

    ``begun`` and ``ended`` are the published ones of when it was sent and of when its reply was whole. ``changed``: weights may
    have been changed in between.
    """
    first_named, last_named = captured.weight_version_first, captured.weight_version_last
    if first_named is None and last_named is None:
        return begun, ended
    if stream or captured.first_named or begun is None or first_named is None or begun >= first_named:
        return first_named, last_named
    if not changed:  # the engine counts by itself
        return first_named, last_named
    for choice in captured.choices:  # one reply in one piece names the weights that ended it
        if choice.weight_version_first is not None:
            choice.weight_version_first = min(begun, choice.weight_version_first)
    return begun, last_named
