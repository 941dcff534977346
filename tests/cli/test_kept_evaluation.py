"""Items of an evaluation: their reasons, and what a resumed evaluation makes of the earlier ones."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentcore_rl_toolkit.backends.collection.collect import collect_async
from agentcore_rl_toolkit.backends.collection.groups import GroupRequest
from agentcore_rl_toolkit.backends.collection.settings import CollectConfig
from agentcore_rl_toolkit.cli.training.kept_evaluation import as_before, finish, finished_before, row_of
from agentcore_rl_toolkit.client import BatchItem
from agentcore_rl_toolkit.client.batch import error_line
from agentcore_rl_toolkit.client.evaluation import score_of
from agentcore_rl_toolkit.contract import Outcome, cause_of, record_error
from agentcore_rl_toolkit.runs import RunWriter

from ..backends.recorded import Episode, Replay

RECORD_ERROR = {"status_code": 500, "stop_reason": "boom", "error_type": "ValueError", "traceback": "Traceback ..."}
BROKEN_CALL = {"status": "error", "http_status": 503, "message": "the engine has ended", "started_s": 5.0}


def item_of(record: dict[str, Any], **facts: Any) -> BatchItem:
    """The item of a record, as the client makes it."""
    error = record_error(record)
    good = error is None
    about = {} if error is None else {"error": error_line(error), "exception": error, "cause": cause_of(error)}
    outcome = Outcome.OK if error is None else Outcome(error.outcome)
    ids = {"index": 0, "input_id": "a", "session_id": "s0", "elapsed": 1.5}
    return BatchItem(success=good, result=record, outcome=outcome, **{**about, **ids, **facts})


async def test_an_agents_failure_has_the_same_reason_as_in_a_training() -> None:
    item, rollout = finish(item_of(RECORD_ERROR), {}, None)
    replay = Replay([Episode(input_id="a", turns=[], record=RECORD_ERROR)])
    [group] = await collect_async(
        [GroupRequest(input_id="a", payload={})], client=replay.client, gateway=replay.gateway, config=CollectConfig()
    )
    assert item.error == rollout.reason == group.rollouts[0].reason
    assert "the agent failed" not in str(item.error)


@pytest.mark.parametrize("record", [{"rewards": 1.0, "status_code": 200}, RECORD_ERROR])
@pytest.mark.parametrize("broken", [True, False])
def test_a_resumed_evaluation_keeps_what_was_decided(tmp_path: Path, record: dict[str, Any], broken: bool) -> None:
    """The gateway is gone by then: only the run knows that a rollout was lost."""
    capture = SimpleNamespace(
        turns=[], errors=[BROKEN_CALL] if broken else [], dialogue=[], train=None, session_id="s0"
    )
    first, rollout = finish(item_of(record), {}, lambda _: capture)
    with RunWriter(tmp_path) as run:
        run.rollout(row_of(first, rollout, {}))
    again = as_before(item_of(record, elapsed=0.0), finished_before(tmp_path)["s0"])
    for name in ("success", "outcome", "cause", "failure", "error", "elapsed", "result"):
        assert getattr(again, name) == getattr(first, name), name
    assert score_of(again) == score_of(first)
