"""Data sets, summaries, replay, metrics."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import prometheus_client
import pytest

from agentcore_rl_toolkit.client import BatchItem, RolloutClient, export_prometheus
from agentcore_rl_toolkit.client.evaluation import read_rows, summarize, write_results
from agentcore_rl_toolkit.contract import ERRORS, Cause, Outcome, cause_of
from agentcore_rl_toolkit.errors import AgentError, ConfigError

from .conftest import MakeClient


def item(
    reward: float | None,
    outcome: Outcome = Outcome.OK,
    input_id: str = "a",
    index: int = 0,
    cause: Cause | None = None,
    failure: str | None = None,
) -> BatchItem:
    record = {} if reward is None else {"rewards": reward}
    return BatchItem(
        outcome is Outcome.OK,
        record,
        outcome=outcome,
        input_id=input_id,
        index=index,
        session_id="s",
        cause=cause or cause_of(None if outcome is Outcome.OK else ERRORS[outcome]("x")),
        failure=failure,
    )


def rambled(input_id: str, reward: float | None = 0.0) -> BatchItem:
    return item(reward, Outcome.AGENT_ERROR, input_id, cause=Cause.POLICY, failure="tokens")


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


def test_rows_take_their_id_from_the_payload_or_the_line(tmp_path: Path) -> None:
    rows = read_rows(write(tmp_path / "d.jsonl", '{"id": 7, "q": 1}', "", '{"q": 2}', '{"input_id": "x"}'))
    assert [row.input_id for row in rows] == ["7", "line-000003", "x"]
    assert rows[0].payload == {"id": 7, "q": 1}


@pytest.mark.parametrize("line", ["{", "[1]", '{"id": "../up"}', '{"id": "a"}\n{"id": "a"}'])
def test_unusable_line_is_named(tmp_path: Path, line: str) -> None:
    with pytest.raises(ConfigError, match=r"d\.jsonl:[12]"):
        read_rows(write(tmp_path / "d.jsonl", line))


def test_failures_of_the_infrastructure_are_counted_and_never_scored() -> None:
    broken = item(0.0, Outcome.AGENT_ERROR, "e", cause=Cause.INFRASTRUCTURE)
    items = [
        broken,
        item(1.0, input_id="a"),
        item(0.0, input_id="b"),
        item(None, Outcome.LOST, "c"),
        item(None, input_id="d"),
    ]
    summary = summarize(items, 3.0)
    assert summary.mean == summary.mean_ok == 0.5
    assert (summary.scored, summary.rewarded, summary.without_reward, summary.failures) == (2, 2, 1, 3)
    assert summary.outcomes == {"ok": 3, "lost": 1, "agent_error": 1}
    assert summary.causes == {"infrastructure": 2}
    assert "not scored: 3 (2 failed by the infrastructure)" in str(summary)
    assert "not scored" not in str(summarize(items[1:3], 3.0))


def test_a_summary_has_a_line_for_each_thing_that_it_knows() -> None:
    solved = [item(1.0, input_id=name) for name in "aabb"]
    solved[0].result = {"rewards": {"reward": 1.0, "format": True}}
    failed = [
        item(None, Outcome.AGENT_ERROR, "a"),
        rambled("b", -1.0),
        item(None, Outcome.CANCELLED, "c"),
        item(None, input_id="c"),
    ]
    failed[0].exception = AgentError("x", error_type="KeyError")
    summary = summarize([*solved, *failed], 2.6, {"calls": 3.0, "cost_usd": 0.25})
    low, high, low_ok, high_ok = (f"{x:.4f}" for x in (summary.low, summary.high, summary.low_ok, summary.high_ok))
    assert str(summary).splitlines() == [
        f"reward 0.6667  (95 % interval {low} to {high}, 6 rollouts); failures of agent and policy are 0",
        f"reward of ok rollouts only 1.0000  (95 % interval {low_ok} to {high_ok}, 4 rollouts)",
        "8 rollouts of 3 inputs in 3 s: 2 agent_error, 1 cancelled, 5 ok, 1 ok without a reward",
        "pass@1 0.6667  pass@2 1.0000  pass@3 1.0000",
        "pass^1 0.6667  pass^2 0.3333  pass^3 0.0000",
        "metrics, mean of ok rollouts: format 1",
        "exceptions: 1 KeyError",
        "the policy failed: 1 tokens",
        "not scored: 2",
        "the judge: 3 calls, 0.25 cost usd",
    ]
    assert str(summarize([], 0.0)) == "no rollout has a reward\n0 rollouts of 0 inputs in 0 s: "
    assert "reward of ok rollouts only none" in str(summarize([rambled("p")], 1.0))
    assert len(str(summarize(solved[1:3], 1.0)).splitlines()) == 2  # one rollout per input
    assert "pass@1 1.0000  pass@2 1.0000\n" in str(summarize(solved[:2], 1.0))


def test_results_are_written_in_order(tmp_path: Path) -> None:
    items = [item(0.0, index=1, input_id="b"), item(1.0, index=0), item(None, Outcome.LOST, "c", 2), rambled("d")]
    items[3].index = 3
    write_results(tmp_path, items, summarize(items, 1.0))
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [line["reward"] for line in lines] == [1.0, 0.0, None, None]
    assert [line["score"] for line in lines] == [1.0, 0.0, None, 0.0]
    assert [line["attempt"] for line in lines] == [1] * 4
    assert [(line["cause"], line["failure"]) for line in lines[2:]] == [("infrastructure", None), ("policy", "tokens")]
    with (tmp_path / "results.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [row["reward"] for row in table] == ["1.0", "0.0", "", ""]  # no reward is empty, not 0
    assert [row["score"] for row in table] == ["1.0", "0.0", "", "0.0"]
    reply = json.loads((tmp_path / "summary.json").read_text())
    assert (reply["failures"], reply["scored"], reply["rewarded"]) == (1, 3, 2)
    assert (reply["mean"], reply["mean_ok"]) == (pytest.approx(1 / 3), 0.5)


def test_the_agents_metrics_and_its_exceptions_are_the_same_everywhere(tmp_path: Path) -> None:
    items = [item(1.0, input_id=f"i{n}", index=n) for n in range(2)]
    items[0].result = {"rewards": {"reward": 1.0, "format": 0.5}, "metrics": {"lamps": 3, "note": "x"}}
    items[1].result = {"rewards": 1.0, "metrics": {"lamps": 4, "other": float("nan")}}
    failed = item(None, Outcome.AGENT_ERROR, "i2", 2)
    failed.exception = AgentError("the agent failed: 'lamp'", error_type="KeyError")
    summary = summarize([*items, failed], 1.0)
    assert summary.metrics == {"format": 0.5, "lamps": 3.5}
    assert summary.errors == {"KeyError": 1}
    assert "format 0.5, lamps 3.5" in str(summary)
    assert "exceptions: 1 KeyError" in str(summary)
    write_results(tmp_path, [*items, failed], summary)
    reply = json.loads((tmp_path / "summary.json").read_text())
    assert (reply["metrics"], reply["errors"]) == (summary.metrics, summary.errors)
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [line["metrics"] for line in lines] == [{"format": 0.5, "lamps": 3.0}, {"lamps": 4.0}, {}]
    with (tmp_path / "results.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [row["metrics.lamps"] for row in table] == ["3.0", "4.0", ""]
    assert [row["error_type"] for row in table] == ["", "", "KeyError"]


def test_subscriber_hears_the_life_of_a_rollout(client: RolloutClient) -> None:
    received: list[tuple[str, dict[str, Any]]] = []
    client.subscribe(lambda event, fields: received.append((event, dict(fields))))
    client.subscribe(lambda event, fields: 1 / 0)  # type: ignore[arg-type,return-value]  # a broken one harms nobody
    session_id = client.map([{"script": {}}])[0].session_id
    client.flush()
    assert [event for event, _ in received] == ["intent", "accepted", "finished", "stopped"]
    assert {fields["session_id"] for _, fields in received} == {session_id}
    assert received[2][1]["outcome"] == "ok"


def test_prometheus_gets_the_counts_of_all_clients_of_a_registry(make_client: MakeClient) -> None:
    registry = prometheus_client.CollectorRegistry(auto_describe=True)  # as the global one
    clients = make_client(), make_client()
    for client in (*clients, clients[0]):
        export_prometheus(client, registry=registry)
    futures = [client.invoke({"script": {"hang": True}}) for client in clients]
    assert registry.get_sample_value("agentcore_rl_in_flight") == 2
    for future, client in zip(futures, clients, strict=True):
        future.cancel()
        client.close()
    assert registry.get_sample_value("agentcore_rl_in_flight") == 0
    assert registry.get_sample_value("agentcore_rl_rollouts_total", {"outcome": "cancelled"}) == 2
    assert prometheus_client.generate_latest(registry).count(b"\nagentcore_rl_in_flight ") == 1
