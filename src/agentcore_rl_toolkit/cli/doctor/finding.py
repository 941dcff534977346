"""The result of a check, and the advice that goes with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from ...errors import AgentCoreRLError

Level = Literal["ok", "note", "fail"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A line of the doctor. A ``note`` means that something works, but slowly or in part. ``advice`` is what to do."""

    level: Level
    name: str
    text: str
    advice: str = ""

    def render(self, width: int) -> str:
        line = f"{self.level:<4}  {self.name:<{width}}  {self.text}"
        return f"{line}\n{'':<{width + 8}}-> {self.advice}" if self.advice else line


Check = Callable[[], Finding | list[Finding]]


def ok(name: str, text: str) -> Finding:
    return Finding(level="ok", name=name, text=text)


def note(name: str, text: str, advice: str) -> Finding:
    return Finding(level="note", name=name, text=text, advice=advice)


def fail(name: str, text: str, advice: str) -> Finding:
    return Finding(level="fail", name=name, text=text, advice=advice)


def run(checks: Iterable[tuple[str, Check]]) -> Iterable[Finding]:
    """Yield the findings of all checks. A check that fails with an error is a finding, too."""
    for name, check in checks:
        try:
            found = check()
        except AgentCoreRLError as e:
            found = fail(name, str(e), "")
        except Exception as e:  # an error of a check must not end the other checks
            found = fail(name, f"the check itself failed: {type(e).__name__}: {e}", "report this as a bug")
        yield from found if isinstance(found, list) else [found]
