"""The reasons of failed rollouts in two lines: the most frequent error, and the line of the agent's code that caused it."""

from __future__ import annotations

import re
import sysconfig
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from ...runs.schema import shape_of
from .commands import nearby

_FRAME = re.compile(r'^  File "([^"]+)", line (\d+), in .*\n    (\S.*)$', re.MULTILINE)
_NOT_THEIRS = (sysconfig.get_path("stdlib"), "/site-packages/", "/dist-packages/", "/agentcore_rl_toolkit/", "<")


@dataclass(frozen=True)
class Failure:
    """A failed rollout as text: its outcome, its error, and the line of the agent's code if it is known."""

    reason: str
    place: str = ""

    @classmethod
    def of(cls, outcome: object, error: str | None, traceback: str | None) -> Failure:
        every = _FRAME.findall(traceback or "")
        frames = [frame for frame in every if not any(text in frame[0] for text in _NOT_THEIRS)]
        reason = str(error) if outcome == "ok" else f"{outcome}: {error}"  # without a reward
        if not frames:
            return cls(reason)
        path, line, code = frames[-1]
        return cls(reason, f"{nearby(Path(path))}, line {line}: {code}")


def explain(failures: list[Failure], total: int) -> str:
    """Return the share of failed rollouts, their most frequent error, and its line."""
    kinds = [failure.place or shape_of(failure.reason) for failure in failures]
    [(most, times)] = Counter(kinds).most_common(1)
    first = failures[kinds.index(most)]
    text = f"{len(failures)} of {total} rollouts failed; {times} of them: {first.reason}"
    return f"{text}\n    {first.place}" if first.place else text
