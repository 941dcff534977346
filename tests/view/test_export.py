"""A run as one file: whatever agents wrote, it is data in it."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from agentcore_rl_toolkit.runs import Rollout, RunReader, RunWriter
from agentcore_rl_toolkit.view.export import export, script

HOSTILE = '@DATA@ @CODE@ </script><script>window.hacked = 1</script> <meta charset="utf-8"> \\u003c 世界'


class Scripts(HTMLParser):
    """The script elements of a page, and what is in them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[dict[str, str | None], str]] = []
        self._open: dict[str, str | None] | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "script":
            self._open = dict(attrs)
            self.found.append((self._open, ""))

    def handle_endtag(self, tag: str) -> None:
        if tag == "script":
            self._open = None

    def handle_data(self, data: str) -> None:
        if self._open is not None:
            self.found[-1] = (self._open, self.found[-1][1] + data)


def test_a_text_that_names_a_place_of_the_page_stays_a_text(tmp_path: Path) -> None:
    message: dict[str, Any] = {"role": "assistant", "content": HOSTILE}
    with RunWriter(tmp_path / "run") as writer:
        writer.rollout(Rollout(session_id="s", phase="train", step=0, group="g", outcome="ok", dialogue=[message]))
    with RunReader(tmp_path / "run") as run:
        export(run, tmp_path / "run.html")
    page = Scripts()
    page.feed((tmp_path / "run.html").read_text())
    [(data, held), (code, program)] = page.found
    assert (data, code) == ({"type": "application/json", "id": "held"}, {"type": "module"})
    assert program == script()
    [rollout] = json.loads(held)["rollouts"].values()
    assert rollout["dialogue"] == [message]
