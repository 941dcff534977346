"""The weight versions of a choice's tokens: those that the engine names, otherwise the gateway's bounds.

An engine that names a version is believed, choice by choice. A version in an event without tokens belongs to a moment without
sampling, so it counts only if no other event names one.

Without a named version there are only bounds: the versions that were published when the call was sent and when its reply was
complete. Every token then counts as sampled by the older one, so that it is never taken for younger than it is.
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
    """The versions that an engine named for one choice. ``both_ends``: it named that of the first and of the last token."""

    __slots__ = ("_with_tokens", "both_ends", "first", "last")

    def __init__(self) -> None:
        self.first: int | None = None
        self.last: int | None = None
        self.both_ends = False
        self._with_tokens = False

    def named(self, version: int, *, tokens: bool) -> None:
        """The engine names a version beside some tokens of the choice, or beside none."""
        if self.both_ends or (self._with_tokens and not tokens):
            return
        if self.first is None or (tokens and not self._with_tokens):
            self.first = version
        self.last = version
        self._with_tokens = tokens

    def spans(self, first: int | None, last: int | None) -> None:
        """The engine names the versions of the first and the last token, which counts more than any other."""
        if first is not None and last is not None:
            self.first, self.last, self.both_ends = first, last, True


def put(captured: Captured, found: Iterable[Versions]) -> None:
    """Write the versions of the choices, in their order, into a capture."""
    named = []
    for choice, versions in zip(captured.choices, found, strict=True):
        choice.weight_version_first, choice.weight_version_last = versions.first, versions.last
        captured.first_named = captured.first_named or versions.both_ends
        if versions.first is not None and versions.last is not None:
            named.append((versions.first, versions.last))
    if named:
        captured.weight_version_first = min(first for first, _ in named)
        captured.weight_version_last = max(last for _, last in named)


def bounds(
    captured: Captured, begun: int | None, ended: int | None, *, changed: bool, stream: bool
) -> tuple[int | None, int | None]:
    """The versions at the first and the last token of a call. Its choices are adjusted to them.

    Args: ``begun`` and ``ended`` are the published versions of when the call was sent and of when its reply was complete.
    ``changed``: weights may have been changed in between. Without that the engine counts by itself.
    """
    first, last = captured.weight_version_first, captured.weight_version_last
    if first is None or last is None:
        return begun, ended
    if stream or captured.first_named or not changed or begun is None or begun >= first:
        return first, last
    for choice in captured.choices:  # one reply in one piece names the weights that ended it
        if choice.weight_version_first is not None:
            choice.weight_version_first = min(begun, choice.weight_version_first)
    return begun, last
