"""One line on stderr for slow work, repeated now and then until the work ends."""

from __future__ import annotations

import time
from collections.abc import Callable

import click

FIRST_S, THEN_S = 3.0, 15.0


class Waiting:
    """Call it while something is waited for: ``what`` is said after three seconds, then every fifteen."""

    def __init__(self, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._what, self._clock = what, clock
        self._began_s = clock()
        self._next_s = self._began_s + FIRST_S

    def __call__(self) -> None:
        now = self._clock()
        if now >= self._next_s:
            self._next_s = now + THEN_S
            click.echo(f"still {self._what} ({now - self._began_s:.0f} s)", err=True)
