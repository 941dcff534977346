"""Rewards of scorers and judges in the results of an evaluation and in its run, also after a resume."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from agentcore_rl_toolkit.backends.collection.groups import Group, GroupRequest
from agentcore_rl_toolkit.backends.collection.recording import open_recording
from agentcore_rl_toolkit.backends.collection.settings import CollectConfig
from agentcore_rl_toolkit.cli.training.evaluation import collect, evaluation_config, item_of, items_before
from agentcore_rl_toolkit.client import BatchItem
from agentcore_rl_toolkit.client.evaluation import reward_of, score_of, summarize
from agentcore_rl_toolkit.contract import Cause, Outcome
from agentcore_rl_toolkit.errors import ConfigError
from agentcore_rl_toolkit.runs import RunReader

from ..backends.recorded import Episode, Replay, ReplayClient
from ..backends.test_llm_judge import judge as judge
from ..backends.test_llm_judge import prose, scores
from ..conftest import CommandLine

OWN = {"rewards": {"reward": 0.5, "turns": 2}, "said": "x", "status_code": 200}
RAISED = {"status_code": 500, "stop_reason": "boom", "error_type": "ValueError", "traceback": "Traceback ..."}
BROKEN_CALL = {"status": "error", "http_status": 503, "message": "the engine has ended", "started_s": 5.0}


def run(folder: Path, config: CollectConfig, episodes: list[Episode], *, gateway: bool = True) -> list[BatchItem]:
    """The items of one rollout per episode, in order."""
    replay, found = Replay(episodes), dict[int, Group]()
    requests = [GroupRequest(input_id=each.input_id, payload={"n": n}) for n, each in enumerate(episodes)]
    with open_recording(folder, {"kind": "eval"}) as recording:
        servers: Any = {"client": replay.client, "gateway": replay.gateway if gateway else None}
        collect(requests, found.__setitem__, config=config, recording=recording.at("eval"), **servers)
    assert not replay.open_sessions
    return [item_of(found[place].rollouts[0], place, config) for place in sorted(found)]


def config(**settings: Any) -> CollectConfig:
    return evaluation_config(max_concurrent=2, rollout_timeout_s=60.0, **settings)


def test_a_scorers_reward_replaces_the_agents_and_its_failure_counts_by_itself(tmp_path: Path) -> None:
    (tmp_path / "score.py").write_text(
        "def score(payload, answer, reference, trajectory): return 1.0 if payload['n'] else 1 / 0\n"
    )
    scored = config(score=f"{tmp_path / 'score.py'}:score")
    failed, good, raised = run(
        tmp_path / "run",
        scored,
        [Episode(input_id="a", record=OWN), Episode(input_id="b", record=OWN), Episode(input_id="c", record=RAISED)],
    )
    assert [score_of(item) for item in (failed, good, raised)] == [None, 1.0, 0.0]
    assert good.result == {
        "said": "x",
        "status_code": 200,
        "rewards": {"reward": 1.0, "turns": 2.0, "agent_reward": 0.5},
    }
    assert (failed.cause, "rewards" in (failed.result or {})) == (Cause.SCORER, False)
    assert "return 1.0 if" in str(failed.traceback)
    assert summarize([failed, good, raised], 1.0).causes == {"scorer": 1, "agent": 1}
    before = items_before(tmp_path / "run", scored, {name: {"n": n} for n, name in enumerate("abc")})
    assert set(before) == {"b", "c"}, "what the scorer failed at runs again"
    for item in (good, raised):
        [again] = before[str(item.input_id)]
        for name in ("success", "outcome", "cause", "failure", "error", "elapsed", "session_id", "result"):
            assert getattr(again, name) == getattr(item, name), name
    with pytest.raises(ConfigError, match="began with another row for input 'b': its payload differs"):
        items_before(tmp_path / "run", scored, {"b": {"n": 2}})


def test_a_rollout_whose_last_model_call_failed_does_not_count_and_one_without_calls_or_reward_is_no_failure(
    tmp_path: Path,
) -> None:
    episodes = [
        Episode(input_id="a", record=OWN, errors=[BROKEN_CALL]),
        Episode(input_id="b", record=OWN),
        Episode(input_id="c", record={"said": "x", "status_code": 200}),
    ]
    lost, silent, unrewarded = run(tmp_path / "run", config(), episodes)
    assert (score_of(lost), lost.outcome, lost.cause) == (None, Outcome.LOST, Cause.INFRASTRUCTURE)
    assert lost.error == "its last model call failed: the engine has ended"
    assert (score_of(silent), silent.outcome) == (0.5, Outcome.OK)
    assert (reward_of(unrewarded), unrewarded.outcome) == (None, Outcome.OK)
    without = run(tmp_path / "other", config(), episodes, gateway=False)
    assert [score_of(item) for item in without] == [0.5, 0.5, None]


def test_a_repeated_rollout_has_the_session_and_number_of_its_last_attempt(tmp_path: Path) -> None:
    class Client(ReplayClient):
        retries = 1

        def submit(self, *given: Any, **options: Any) -> Any:
            future: Any = super().submit(*given, **options)
            future.session_id, future.attempt = "second", 2
            return future

    found = dict[int, Group]()
    with open_recording(tmp_path, {"kind": "eval"}) as recording:
        collect(
            [GroupRequest(input_id="a", payload={})],
            found.__setitem__,
            client=Client(Replay([Episode(input_id="a", record=OWN)])),
            gateway=None,
            config=config(),
            recording=recording.at("eval"),
        )
    item = item_of(found[0].rollouts[0], 0, config())
    assert (item.session_id, item.attempt) == ("second", 2)
    [again] = items_before(tmp_path, config(), {"a": {}})["a"]
    assert (again.session_id, again.attempt) == ("second", 2)


def test_a_judges_rewards_and_reasons_are_in_results_and_run(tmp_path: Path, judge: Any) -> None:
    settings, _ = judge(lambda body: scores(body, lambda _, dialogue: 1.0))
    [item] = run(
        tmp_path / "run", config(**dict(settings)), [Episode(input_id="a", record={"said": "x", "status_code": 200})]
    )
    assert item.result is not None
    assert (reward_of(item), item.result["judge"]) == (1.0, "because 1.0")
    with RunReader(tmp_path / "run") as reader:
        [row] = reader.rollouts()
        assert row["reward"] == 1.0
    settings, _ = judge(prose)
    [item] = run(
        tmp_path / "fails",
        config(**dict(settings)),
        [Episode(input_id="a", record={"said": "x", "status_code": 200})],
    )
    assert (reward_of(item), "not the requested JSON" in str(item.error)) == (None, True)
    assert dataclasses.asdict(summarize([item], 1.0))["failures"] == 1


def test_a_weight_without_a_judge_is_refused(tmp_path: Path, command_line: CommandLine) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "hi"}\n')
    words = ("--agent", "agent.py", "--data", str(tmp_path / "rows.jsonl"), "--judge-weight", "0.5")
    done = command_line("eval", *words)
    assert (done.returncode, done.stderr) == (2, "error: --judge-weight needs --judge FILE\n")
