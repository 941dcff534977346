"""Each run that cannot learn shows its cause first, with the number of the rollouts that its link lists."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentcore_rl_toolkit.runs import Query, RunReader, diagnose
from runs_that_cannot_learn import SENTENCES, write

GROUPS_OR_NUMBERS = ("all_fail", "all_pass", "no_spread", "opposed")  # their sentences count no rollouts


@pytest.mark.parametrize(("kind", "sentence"), SENTENCES.items())
def test_a_run_that_cannot_learn_shows_its_cause_first(tmp_path: Path, kind: str, sentence: str) -> None:
    write(tmp_path / kind, kind)
    with RunReader(tmp_path / kind) as run:
        first = diagnose(run)[0]
        assert first.name == kind
        assert sentence in first.text
        if first.query and kind not in GROUPS_OR_NUMBERS:
            assert f"{run.total(Query(**first.query))} of " in first.text or "None of" in first.text
