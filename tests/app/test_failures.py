"""Death, outages and size: whatever happens to the process or the store, no record is lost in silence."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from agentcore_rl_toolkit.contract import Outcome, record_outcome
from agentcore_rl_toolkit.proof import Proof, check
from serving import wait_for as until

AGENT = """
@app.rollout_entrypoint
def run(payload):
    time.sleep(payload.get("s", 0))
    return {"rewards": 1.0}
"""

ASYNC_AGENT = """
@app.rollout_entrypoint
async def run(payload):
    await asyncio.sleep(payload.get("s", 0))
    return {"rewards": 1.0}
"""


@pytest.fixture(scope="module")
def s3_agent(start_shared_agent: Any, shared_s3: Any) -> Any:
    """One agent with the endpoint of `faulty_s3`, for the tests that do not end it."""
    return start_shared_agent(AGENT, env={**shared_s3.env, **PATIENT})


AWKWARD_AGENT = """
import threading
from agentcore_rl_toolkit import RewardFunction

class Broken(Exception):
    def __str__(self):
        raise KeyboardInterrupt

    __repr__ = __str__

class Unpicklable(Exception):
    def __init__(self):
        super().__init__(threading.Lock())

class Best(RewardFunction):
    def __call__(self, *, scores):
        return next(score for score in scores if score > 0)

class Result:
    def __init__(self, error):
        self.error = error

    def model_dump(self):
        raise self.error

def cycle():
    one, other = ValueError("one"), KeyError("other")
    one.__cause__, other.__cause__ = other, one
    one.__context__, other.__context__ = other, one
    return one

ERRORS = {
    "cycle": cycle,
    "group": lambda: ExceptionGroup("several", [ValueError("one"), StopIteration(2)]),
    "base group": lambda: BaseExceptionGroup("several", [KeyboardInterrupt(), Broken()]),
    "surrogate": lambda: ValueError("\\ud800"),
    "asyncio.CancelledError": asyncio.CancelledError,
    "InvalidStateError": asyncio.InvalidStateError,
}

def fail(payload):
    kind = payload["kind"]
    if kind == "reward":
        return {"rewards": Best()(scores=[-1.0])}
    error = ERRORS[kind]() if kind in ERRORS else eval(kind)()
    if payload["where"] == "result":
        return Result(error)
    raise error

async def fail_async(payload):
    return fail(payload)

async def fail_in_a_task(payload):
    return await asyncio.create_task(fail_async(payload))

@app.rollout_entrypoint
def run(payload):
    return {"async": fail_async, "task": fail_in_a_task}.get(payload["where"], fail)(payload)
"""


@pytest.fixture(scope="module")
def awkward_agent(start_shared_agent: Any) -> Any:
    return start_shared_agent(AWKWARD_AGENT)


AWKWARD = {
    "StopIteration": "StopIteration",
    "StopAsyncIteration": "StopAsyncIteration",
    "GeneratorExit": "GeneratorExit",
    "KeyboardInterrupt": "KeyboardInterrupt",
    "SystemExit": "SystemExit",
    "asyncio.CancelledError": "CancelledError",
    "InvalidStateError": "InvalidStateError",
    "group": "ExceptionGroup",
    "base group": "BaseExceptionGroup",
    "Broken": "Broken",
    "Unpicklable": "Unpicklable",
    "cycle": "ValueError",
    "surrogate": "ValueError",
    "reward": "StopIteration",
}


WHERE = [(kind, where) for kind in AWKWARD for where in ("thread", "async")]
WHERE += [("SystemExit", "task"), ("KeyboardInterrupt", "task")]
WHERE += [("StopIteration", "result"), ("SystemExit", "result"), ("Broken", "result")]


@pytest.mark.parametrize(("kind", "where"), WHERE)
def test_an_awkward_exception_ends_as_a_record(awkward_agent: Any, kind: str, where: str) -> None:
    path, _ = awkward_agent.rollout({"kind": kind, "where": where}, heartbeat_s=0.2)
    record = awkward_agent.record(path)
    expected = AWKWARD[kind]
    if expected == "StopIteration" and where == "async":
        expected = "RuntimeError"  # Python's own rule for coroutines
    assert (record["error_type"], record["status_code"]) == (expected, 500)
    assert (record["outcome"], record["_agent"]["cause"]) == ("agent_error", "agent")
    assert record["stop_reason"]
    assert "agent_" in record["traceback"]
    assert path.stat().st_size < 500_000
    until(lambda: not alive(path).exists())


# An answer waits for what the store says, however long a busy machine takes.
PATIENT = {"AGENTCORE_RL_STORE_CHECK_S": "50"}


def alive(path: Path) -> Path:
    return path.with_suffix(".alive")


@pytest.mark.parametrize(
    "source",
    [ASYNC_AGENT, AGENT.replace("time.sleep(payload", "time.sleep(0.1); exec('while True: pass'); (payload")],
)
def test_sigterm_leaves_an_interrupted_record(start_agent: Any, source: str) -> None:
    agent = start_agent(source)
    path, reply = agent.rollout({"s": 600}, proof_key="5ec7e7" * 10)
    until(alive(path).exists)
    assert agent.terminate(60) in (0, -signal.SIGTERM)
    assert check(path.read_bytes(), reply["result_key"], "5ec7e7" * 10) is Proof.PROVEN
    record = json.loads(path.read_text())
    assert record["status_code"] == 500
    assert record["stop_reason"].startswith("interrupted: ")
    assert record["error_type"] == "Interrupted"
    assert record_outcome(record) is Outcome.LOST
    assert not alive(path).exists()


@pytest.mark.system
def test_the_users_own_lifespan_runs_and_sees_the_interrupted_record_stored(start_agent: Any) -> None:
    agent = start_agent(
        """
        import contextlib
        @contextlib.asynccontextmanager
        async def lifespan(app):
            open("started", "w").close()
            yield
            open("stopped", "w").close()
        app = AgentCoreRLApp(lifespan=lifespan)
        """
        + AGENT.replace("\n", "\n        ")
    )
    path, _ = agent.rollout({"s": 600})
    until(alive(path).exists)
    folder = agent.results.parent
    assert (folder / "started").exists()
    assert not (folder / "stopped").exists()
    agent.terminate(60)
    assert (folder / "stopped").exists()
    assert json.loads(path.read_text())["error_type"] == "Interrupted"


def test_the_heartbeat_is_renewed_while_the_agent_blocks_and_goes_with_the_record_or_stale_at_sigkill(
    start_agent: Any,
) -> None:
    agent = start_agent(ASYNC_AGENT.replace("await asyncio.sleep", "time.sleep"))
    path, _ = agent.rollout({"s": 1.5}, heartbeat_s=0.2)
    until(alive(path).exists)
    beats = set()
    while not path.exists():
        try:
            beats.add(alive(path).stat().st_mtime_ns)
        except FileNotFoundError:
            break
        time.sleep(0.02)
    assert len(beats) >= 4
    agent.record(path)
    until(lambda: not alive(path).exists())
    path, reply = agent.rollout({"s": 600}, heartbeat_s=0.2)
    assert reply["heartbeat_s"] == 0.2
    until(alive(path).exists)
    agent.process.kill()
    agent.process.wait(60)
    last = alive(path).stat().st_mtime_ns
    time.sleep(0.6)
    assert alive(path).stat().st_mtime_ns == last
    assert not path.exists()
    sign = json.loads(alive(path).read_text())
    assert sign["session_id"] == path.stem
    assert (sign["attempt"], sign["period_s"]) == (1, 0.2)
    assert sign["started_s"] <= sign["beat_s"] <= time.time()


def test_an_outage_of_the_store_delays_the_record_and_the_heart_beats_on(s3_agent: Any, faulty_s3: Any) -> None:
    agent = s3_agent
    down = [True]
    faulty_s3.fault = lambda _method, key: 503 if key.endswith(".json") and down[0] else None

    def beats_since_the_first_refusal() -> int:
        keys = [key for _, key, _ in faulty_s3.log]
        first = next((i for i, entry in enumerate(faulty_s3.log) if entry[2] == 503), len(keys))
        return sum(key.endswith(".alive") for key in keys[first:])

    agent.rollout(s3_bucket="the-bucket", heartbeat_s=0.3, session="o" * 40)
    until(lambda: beats_since_the_first_refusal() >= 3)
    until(lambda: sum(status == 503 for _, _, status in faulty_s3.log) >= 3)
    assert not faulty_s3.records()
    down[0] = False
    (record,) = until(faulty_s3.records).values()
    assert record["rewards"] == 1.0
    until(lambda: not any(key.endswith(".alive") for key in faulty_s3.objects))
    assert sum(status == 200 and key.endswith(".json") for _, key, status in faulty_s3.log) == 1
    assert agent.ping() == "Healthy" or until(lambda: agent.ping() == "Healthy")


def test_answers_that_get_lost_make_no_second_record_and_no_error(s3_agent: Any, faulty_s3: Any) -> None:
    lost: list[str] = []

    def fault(method: str, key: str) -> int | None:
        if method == "PUT" and key.endswith(".json") and not lost:
            lost.append(key)
            return -1
        return None

    faulty_s3.fault = fault
    before = len(s3_agent.log)
    s3_agent.rollout(s3_bucket="the-bucket", heartbeat_s=0)
    until(lambda: "record stored" in s3_agent.log[before:])
    assert lost
    assert len(faulty_s3.records()) == 1
    assert "already contains a record" not in s3_agent.log[before:]


BUCKET = {"exp_id": "exp", "input_id": "input", "s3_bucket": "the-bucket"}


def test_a_store_that_refuses_for_good_is_answered_at_once_and_frees_the_session(s3_agent: Any, faulty_s3: Any) -> None:
    faulty_s3.fault = lambda _method, _key: 403
    agent = s3_agent
    status, reply = agent.invoke({"s": 600, "_rollout": BUCKET}, "f" * 40)
    assert (status, reply["status"], reply["error_type"]) == (200, "refused", "StorePermissionError")
    refused = [(method, key) for method, key, _ in faulty_s3.log]
    assert len(set(refused)) == len(refused)  # nothing was tried again: that is for what may pass
    assert "the-bucket" in reply["error"]
    assert "needs s3:PutObject, s3:GetObject and s3:DeleteObject on exp/*" in reply["error"]
    assert (reply["s3_bucket"], reply["result_key"]) == (
        "the-bucket",
        f"exp/input/{'f' * 40}.json",
    )  # as published ones read it
    until(lambda: agent.ping() == "Healthy")
    assert f"the record of exp/input/{'f' * 40}.json is lost" in agent.log
    faulty_s3.fault = lambda _method, _key: None
    agent.rollout(s3_bucket="the-bucket", session="f" * 40)  # the same delivery again, after access was granted
    assert until(faulty_s3.records)[f"exp/input/{'f' * 40}.json"]["rewards"] == 1.0


def test_a_delivery_that_comes_while_an_earlier_one_is_refused_is_refused_too(s3_agent: Any, faulty_s3: Any) -> None:
    refuse = threading.Event()
    faulty_s3.fault = lambda _method, _key: 403 if refuse.wait(60) else 500
    with ThreadPoolExecutor() as pool:
        replies = [pool.submit(s3_agent.invoke, {"s": 600, "_rollout": BUCKET}, "e" * 40) for _ in range(2)]
        until(lambda: f"delivered again: exp/input/{'e' * 40}.json" in s3_agent.log)
        refuse.set()
        assert [reply.result()[1]["status"] for reply in replies] == ["refused", "refused"]
    until(lambda: s3_agent.ping() == "Healthy")


@pytest.mark.system
def test_the_grace_is_bounded(start_agent: Any, faulty_s3: Any) -> None:
    faulty_s3.fault = lambda _method, _key: 503
    agent = start_agent(AGENT, env={**faulty_s3.env, "AGENTCORE_RL_GRACE_S": "1"})
    agent.rollout({"s": 600}, s3_bucket="the-bucket", session="h" * 40)
    agent.terminate()  # the store refuses for as long as the test runs: only the grace ends this
    # In the agent's own words, whose clock does not count its start and its end.
    by_store = re.search(r"h{40}\.json is lost: .* did not succeed within ([\d.]+) s", agent.log)
    by_app = f"record not stored within 1 s of the shutdown: exp/input/{'h' * 40}"
    assert by_app in agent.log or (by_store is not None and float(by_store[1]) < 10), (
        agent.log
    )  # 20 without the setting


@pytest.mark.system
def test_rollouts_work_in_a_process_forked_from_a_loaded_template(start_agent: Any) -> None:
    agent = start_agent(
        AGENT.replace("rewards", 'pid": os.getpid(), "rewards')
        + """
import uvicorn
served = uvicorn.run
def fork_then_serve(*args, **options):
    # what a warm template does: everything is loaded up to app.run(), then the session is a fork of it
    assert len(os.listdir("/proc/self/task")) == 1, os.listdir("/proc/self/task")
    pid = os.fork()
    if pid == 0:
        served(*args, **options)
        os._exit(0)
    import signal
    signal.signal(signal.SIGTERM, lambda *_: os.kill(pid, signal.SIGTERM))
    os.waitpid(pid, 0)
uvicorn.run = fork_then_serve
"""
    )
    record = agent.run()
    assert record["rewards"] == 1.0
    assert record["pid"] != agent.process.pid
    path, _ = agent.rollout({"s": 600})
    until(alive(path).exists)
    agent.terminate(60)
    assert json.loads(path.read_text())["error_type"] == "Interrupted"
    assert not os.path.exists(f"/proc/{record['pid']}")
