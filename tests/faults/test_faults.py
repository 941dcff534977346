"""What goes wrong in production, done to real sessions: nothing is lost, nothing runs twice, every outcome has its type."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentcore_rl_toolkit.client import BatchItem, RolloutClient
from agentcore_rl_toolkit.client.ledger import attempts_of, parse_lines
from agentcore_rl_toolkit.contract import Outcome
from agentcore_rl_toolkit.errors import AgentError, RolloutLostError

Row = Callable[..., None]
pytestmark = pytest.mark.slow


def exp(name: str) -> str:
    return f"{name}-{uuid.uuid4().hex[:8]}"


def judge(world: Any, row: Row, fault: str, client: RolloutClient, items: list[BatchItem], sent: int) -> Counter[str]:
    """The three promises, checked the same way for every fault."""
    outcomes: Counter[str] = Counter(str(item.outcome) for item in items)
    client.flush()
    sessions = [item.session_id for item in items if item.session_id]
    twice = sum(n > 1 for n in world.runs(sessions).values())
    left = world.left()
    row(fault, sent, outcomes, lost_count=sent - len(items), twice=twice, leaked=left)
    assert len(items) == sent
    assert {item.index for item in items} == set(range(sent))
    assert twice == 0
    assert left == 0
    for item in items:
        assert item.outcome is not None
        assert item.success == (item.outcome is Outcome.OK)
        assert (item.exception is None) == item.success
    return outcomes


CASES = [
    ("agent SIGTERMed", "sigterm", {Outcome.LOST}, RolloutLostError),
    ("agent out of memory", "out_of_memory", {Outcome.AGENT_ERROR, Outcome.LOST}, (AgentError, RolloutLostError)),
    ("agent raises", "raise", {Outcome.AGENT_ERROR}, AgentError),
    ("agent returns a list", "not_a_dict", {Outcome.AGENT_ERROR, Outcome.INVALID}, Exception),
]
ACTS = ["sigterm", "out_of_memory", "raise", "not_a_dict"]


@pytest.mark.system
@pytest.mark.parametrize(("fault", "act", "outcomes", "error"), CASES, ids=ACTS)
def test_agent_that_fails_is_a_typed_failure_and_its_neighbours_are_fine(
    world: Any, row: Row, fault: str, act: str, outcomes: set[Outcome], error: Any
) -> None:
    client = world.client(exp(act))
    batch = [{"act": act}, {"act": act}, {"run_s": 0.2}, {"run_s": 0.2}]
    items = client.map(batch, timeout=60)
    judge(world, row, fault, client, items, 4)
    for item in items[:2]:
        assert item.outcome in outcomes
        assert isinstance(item.exception, error)
        assert act != "sigterm" or item.result is not None  # its record ended it, not the silence
    assert all(item.success for item in items[2:])


@pytest.mark.system
def test_killed_session_is_lost_and_its_runtime_says_why(world: Any, row: Row) -> None:
    client = world.client(exp("kill"), "killed")
    items = client.map([{"run_s": 2.0}] * 4, timeout=60)
    assert judge(world, row, "agent SIGKILLed", client, items, 4) == {"ok": 2, "lost": 2}
    for item in items:
        if item.outcome is Outcome.LOST:
            assert isinstance(item.exception, RolloutLostError)
            assert "the session's process was killed by SIGKILL" in (item.error or "")


@pytest.mark.system
@pytest.mark.parametrize("when", ["before", "after"])
def test_dropped_connection_does_not_run_an_agent_twice(world: Any, row: Row, when: str) -> None:
    client = world.client(exp("drop"), f"dropped_{when}")
    items = client.map([{"run_s": 1.0}] * 8, timeout=60)
    outcomes = judge(world, row, f"connection dropped {when} the agent got the request", client, items, 8)
    if when == "after":
        assert outcomes == {"ok": 8}
    else:  # half of the requests vanished: nobody can know, so nobody is asked again
        assert outcomes == {"ok": 4, "lost": 4}


DEATHS = [
    ("at its start", "never_up", {}),
    ("while it takes the invoke", "killed_at_once", {"run_s": 60}),
    ("at once after it took the invoke", "plain", {"act": "exit"}),
]


@pytest.mark.system
@pytest.mark.parametrize(("when", "agent", "payload"), DEATHS, ids=[case[0] for case in DEATHS])
def test_an_agent_that_dies_is_lost_whenever_it_dies(
    world: Any, row: Row, when: str, agent: str, payload: dict[str, Any]
) -> None:
    client = world.client(exp("dies"), agent)
    items = client.map([payload] * 2, timeout=90)
    assert judge(world, row, f"agent dies {when}", client, items, 2) == {"lost": 2}
    for item in items:
        assert isinstance(item.exception, RolloutLostError)


CLIENT = """
import os, signal, sys, threading
from agentcore_rl_toolkit.client import Deadlines, RolloutClient, WatchSettings

arn, url, store, exp_id, ledger, kill_at, count = sys.argv[1:8]
client = RolloutClient(
    arn, store, exp_id, endpoint_url=url, tps_limit=200,
    watch=WatchSettings(heartbeat_s=0.5, lost_after_s=4.0), deadlines=Deadlines(start_s=30, confirm_s=3, stop_s=30),
)
seen = 0

def die(event, fields):
    global seen
    if event != kill_at.partition("+")[0]:
        return
    seen += 1
    if seen == 5:
        if kill_at.endswith("+"):
            threading.Timer(0.03, os.kill, (os.getpid(), signal.SIGKILL)).start()
        else:
            os.kill(os.getpid(), signal.SIGKILL)

client.subscribe(die)
batch = [{"run_s": 0.4 + 0.1 * (n % 4), "row": n} for n in range(int(count))]
items = client.map(batch, 6, timeout=60, input_ids=[f"row{n}" for n in range(int(count))], resume=True, ledger=ledger)
client.flush()
print(sum(item.success for item in items))
client.close()
"""


@pytest.mark.parametrize(
    ("point", "kill_at"),
    [
        ("when a session was accepted", "accepted"),
        pytest.param("before an invoke is sent", "intent", marks=pytest.mark.system),
        pytest.param("while an invoke is on the wire", "intent+", marks=pytest.mark.nightly),  # before or after that
        pytest.param("when a result was read", "finished", marks=pytest.mark.system),
        pytest.param("when a session was stopped", "stopped", marks=pytest.mark.nightly),  # later than the one above
    ],
)
def test_killed_client_goes_on_where_it_was(world: Any, row: Row, tmp_path: Path, point: str, kill_at: str) -> None:
    exp_id, ledger, count = exp("resume"), tmp_path / "ledger.jsonl", 12
    arguments = [world.arns["plain"], world.url, world.store_url, exp_id, str(ledger)]

    def run(kill: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-W", "ignore", "-c", CLIENT, *arguments, kill, str(count)]
        return subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ.copy())

    killed = run(kill_at)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    resumed = run("nothing")
    assert resumed.returncode == 0, resumed.stderr
    attempts = attempts_of(parse_lines(ledger.read_bytes()))
    runs = world.runs(list(attempts))
    records = world.records(exp_id)
    twice = sum(n > 1 for n in runs.values()) + sum(n > 1 for n in records.values())
    left = world.left()
    row(
        f"client killed {point}",
        count,
        Counter({"ok": int(resumed.stdout)}),
        lost_count=count - len(records),
        twice=twice,
        leaked=left,
    )
    assert resumed.stdout.strip() == str(count)
    assert records == {f"row{n}": 1 for n in range(count)}
    assert twice == 0
    assert left == 0
    assert all(attempt.stopped for attempt in attempts.values())
