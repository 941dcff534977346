"""A run in other programs' viewers, read back with their own code: Inspect's log reader and Trackio's database."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from agentcore_rl_toolkit.cli.main import cli
from agentcore_rl_toolkit.errors import MissingExtraError
from agentcore_rl_toolkit.runs import Rollout, RunWriter, TokenSequence
from agentcore_rl_toolkit.view import inspect_log

pytestmark = pytest.mark.timeout(600)

READ_LOG = """
import json, sys
from inspect_ai.log import read_eval_log
log = read_eval_log(sys.argv[1])
def told(e):
    return {"event": e.event, "name": getattr(e, "name", None) or getattr(e, "function", None),
        "input": len(e.input) if e.event == "model" else None, "result": getattr(e, "result", None)}
print(json.dumps({
    "status": log.status, "task": log.eval.task, "mean": log.results.scores[0].metrics["mean"].value,
    "samples": [{"id": s.id, "epoch": s.epoch, "reward": s.scores["reward"].value if s.scores else None,
        "roles": [m.role for m in s.messages], "last": s.messages[-1].text if s.messages else None,
        "calls": [[c.function, c.arguments, c.parse_error] for m in s.messages for c in getattr(m, "tool_calls", None) or ()],
        "error": s.error and s.error.message, "events": [told(e) for e in s.events], "metadata": s.metadata,
        "seconds": s.total_time} for s in log.samples]}))
"""
READ_TRACKIO = """
import json
from trackio.sqlite_storage import SQLiteStorage
[run] = SQLiteStorage.get_runs("agentcore-rl")
traces = SQLiteStorage.get_traces("agentcore-rl", run)
print(json.dumps([run, SQLiteStorage.get_logs("agentcore-rl", run), traces], default=str))
"""


def rollout(n: int, **facts: Any) -> Rollout:
    call = {"id": f"c{n}", "function": {"name": "calculator", "arguments": '{"expression": "1+1"}' if n else "{broken"}}
    dialogue = [
        {"role": "system", "content": "You count."},
        {"role": "user", "content": [{"type": "text", "text": f"How many lamps, {n}?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": f"c{n}", "content": "2"},
        {"role": "assistant", "content": f"{n} lamps.", "reasoning_content": "Let me see."},
    ]
    calls = [
        {
            "started_s": 100.2,
            "finished_s": 100.6,
            "prompt_tokens": 20,
            "sampled_tokens": 3,
            "finish_reason": "tool_calls",
        },
        {"started_s": 101.0, "finished_s": 101.5, "prompt_tokens": 30, "sampled_tokens": 2, "finish_reason": "length"},
    ]
    values: dict[str, Any] = {
        "phase": "train",
        "step": n // 2,
        "group": f"step-{n // 2}/0000",
        "place": n % 2,
        "outcome": "ok",
        "reward": float(n),
        "score": float(n),
        "dialogue": dialogue,
        "sequences": [TokenSequence(ids=[1, 2, 3], mask=[0, 1, 1], logprobs=[None, -2.5, -0.5])],
        "fidelity": {"turns": 2, "sampled_tokens": 5, "trained_tokens": 5},
        "stages": {"queue": 0.1, "start": 0.1, "run": 1.6},
        "calls": calls,
        "elapsed_s": 1.8,
        "ended_s": 101.8,
    }
    return Rollout(session_id=f"s{n}", **{**values, **facts})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("elsewhere")
    with RunWriter(work / "runs" / "shop") as run:
        for n in range(4):
            run.rollout(rollout(n))
        failed: dict[str, Any] = {"reward": None, "score": 0.0, "dialogue": [], "sequences": None, "calls": []}
        failed |= {"outcome": "agent_error", "cause": "agent", "error": "ValueError: no lamp", "traceback": "Trace"}
        run.rollout(rollout(5, **failed))
        run.event("step", {"step": 0, "loss": 0.5})
    return work


@pytest.mark.parametrize("to", ["inspect", "trackio"])
def test_without_the_extra_the_command_that_installs_it_is_named(folder: Path, to: str) -> None:
    if importlib.util.find_spec({"inspect": "inspect_ai", "trackio": "trackio"}[to]) is not None:
        pytest.skip("it is installed here")
    done = CliRunner().invoke(cli, ["view", str(folder / "runs" / "shop"), "--to", to])
    assert isinstance(done.exception, MissingExtraError)
    assert f"[{to}]" in str(done.exception)


@pytest.fixture(scope="module")
def python(make_environment: Any) -> str:
    return make_environment("viewers-test", "inspect-ai>=0.3.240", "trackio>=0.30", upon_this=True)


def run(python: str, folder: Path, *words: str) -> str:
    environment = {**os.environ, "TRACKIO_DIR": str(folder / "trackio"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [python, "-W", "ignore", *words], capture_output=True, text=True, timeout=240, cwd=folder, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.nightly
def test_inspect_reads_the_log_with_its_events(python: str, folder: Path) -> None:
    reply = run(python, folder, "-m", "agentcore_rl_toolkit", "view", "shop", "--to", "inspect")
    assert "5 of 5 rollouts" in reply
    log = json.loads(run(python, folder, "-c", READ_LOG, str(folder / "runs" / "shop" / "inspect" / "shop.eval")))
    assert (log["status"], log["task"], log["mean"]) == ("success", "shop", 1.5)
    samples = {(s["id"], s["epoch"]): s for s in log["samples"]}
    assert len(samples) == 5
    first = next(s for s in log["samples"] if s["last"] == "1 lamps.")
    assert first["reward"] == 1.0
    assert first["roles"] == ["system", "user", "assistant", "tool", "assistant"]
    assert first["calls"] == [["calculator", {"expression": "1+1"}, None]]
    assert first["metadata"]["least_likely"] == -2.5
    assert first["seconds"] == 1.8
    names = [(e["event"], e["name"]) for e in first["events"]]
    assert names == [
        ("sample_init", None),
        ("span_begin", "queue"),
        ("span_end", None),
        ("span_begin", "start"),
        ("span_end", None),
        ("span_begin", "run"),
        ("model", None),
        ("tool", "calculator"),
        ("model", None),
        ("span_end", None),
        ("score", None),
    ]
    assert [e["input"] for e in first["events"] if e["event"] == "model"] == [2, 4]
    assert [e["result"] for e in first["events"] if e["event"] == "tool"] == ["2"]
    broken = next(s for s in log["samples"] if s["last"] == "0 lamps.")
    assert "not JSON" in broken["calls"][0][2]
    failed = next(s for s in log["samples"] if s["error"])
    assert (failed["error"], failed["reward"]) == ("ValueError: no lamp", None)


@pytest.mark.nightly
def test_inspect_view_shows_dialogue_tools_tokens_and_scores(python: str, folder: Path, browser: Any) -> None:
    run(python, folder, "-m", "agentcore_rl_toolkit", "view", "shop", "--to", "inspect")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["-m", "inspect_ai", "view", "--log-dir", str(folder / "runs" / "shop" / "inspect")]
    serving = subprocess.Popen([python, "-W", "ignore", *words, "--host", "127.0.0.1", "--port", str(port)])
    page = browser.new_page()
    page.set_default_timeout(60_000)
    entries: list[str] = []
    page.on("pageerror", lambda e: entries.append(str(e)))
    try:
        deadline_s = time.monotonic() + 90
        while True:
            try:
                page.goto(f"http://127.0.0.1:{port}/#/tasks/shop.eval")
                break
            except Exception:  # not listening yet
                assert serving.poll() is None
                assert time.monotonic() < deadline_s
                time.sleep(0.2)
        page.wait_for_selector("text=How many lamps, 1?")
        assert "55" in page.inner_text("body")  # tokens of its two calls
        page.click("text=How many lamps, 1? >> nth=0")
        for shown in ("Tool: calculator", "Model Call", "1 lamps.", "You count."):
            page.wait_for_selector(f"text=/{shown}/i >> nth=0")
        page.click("role=tab[name=Scoring]")
        page.wait_for_selector("text=outcome ok")
    finally:
        serving.terminate()
        serving.wait(30)
        page.close()
    assert entries == []


@pytest.mark.nightly
def test_trackio_has_the_curves_and_the_worst_dialogues(python: str, folder: Path) -> None:
    reply = run(python, folder, "-m", "agentcore_rl_toolkit", "view", "shop", "--to", "trackio")
    assert "3 steps and evaluations, 4 dialogues" in reply
    name, logs, traces = json.loads(run(python, folder, "-c", READ_TRACKIO))
    assert name == "shop"
    by_step = {entry["step"]: entry for entry in logs}
    assert by_step[0]["reward"] == 0.5
    assert by_step[0]["loss"] == 0.5
    assert by_step[2]["outcome/agent_error"] == 1
    assert len(traces) == 4
    assert {f"{n} lamps." in json.dumps(traces) for n in range(4)} == {True}


def test_arguments_of_any_depth_are_shown_as_they_were_written() -> None:
    made = inspect_log._call(SimpleNamespace(ToolCall=dict), "c1", "calculator", "[" * 100_000)
    assert "not JSON" in made["parse_error"]
    assert made["arguments"] == {"arguments": "[" * 100_000}
