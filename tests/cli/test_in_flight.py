"""`agentcore-rl runs show --in-flight` while a collection hangs: in a tool, at the engine, at a runtime that was stopped."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from agentcore_rl_toolkit.backends import CollectConfig, GroupRequest, collect_async, open_recording
from agentcore_rl_toolkit.cli.main import cli
from agentcore_rl_toolkit.client import RolloutClient
from agentcore_rl_toolkit.gateway import GatewayClient
from agentcore_rl_toolkit.gateway.testing import ScriptedModel
from agentcore_rl_toolkit.runs import RunWriter
from agentcore_rl_toolkit.runs.in_flight import IN_FLIGHT
from agentcore_rl_toolkit.runtime import LocalRuntime
from serving import gateway_before

pytestmark = pytest.mark.timeout(600)
DEADLINE_S = 90.0
AGENT = """
import json
import threading
import urllib.request

from agentcore_rl_toolkit import AgentCoreRLApp

app = AgentCoreRLApp()


def ask(rollout):
    body = {"model": "m", "messages": [{"role": "user", "content": "How many lamps?"}]}
    request = urllib.request.Request(
        rollout["base_url"] + "/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json", "authorization": "Bearer " + rollout["api_key"]},
    )
    urllib.request.urlopen(request).read()


@app.rollout_entrypoint
def invoke_agent(payload):
    if payload["hangs"] == "tool":
        print("counting lamps", flush=True)
        threading.Event().wait()
    ask(payload["_rollout"])
    return {"rewards": 1.0}


app.run()
"""


@dataclass
class Hanging:
    folder: Path
    runtime: LocalRuntime
    engine: str


@pytest.fixture
async def hanging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Hanging]:
    """A collection of two rollouts: one whose tool never returns, one whose model never answers."""
    monkeypatch.setenv("AWS_REGION", "us-west-2")
    (tmp_path / "agent.py").write_text(AGENT)
    release = threading.Event()

    def decide(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
        release.wait(200)
        return "None."

    (tmp_path / "store").mkdir()
    store = ["--store", str(tmp_path / "store")]
    with (
        ScriptedModel(decide) as model,
        gateway_before(model.url) as gateway,
        LocalRuntime({"agent": tmp_path / "agent.py"}, store) as runtime,
    ):
        for name, value in runtime.credentials.items():
            monkeypatch.setenv(name.upper(), value)
        client = RolloutClient(
            runtime.arns["agent"], f"file://{tmp_path / 'store'}", "stuck", endpoint_url=runtime.url, model_id="m"
        )
        requests = [GroupRequest(input_id=name, payload={"hangs": name}, n=1) for name in ("tool", "model")]
        try:
            with open_recording(tmp_path / "run", {}) as recording:
                collecting = asyncio.create_task(
                    collect_async(
                        requests,
                        client=client,
                        gateway=GatewayClient(gateway.url),
                        config=CollectConfig(rollout_timeout_s=200.0),
                        recording=recording.at("train", 0),
                    )
                )
                yield Hanging(tmp_path / "run", runtime, model.url)
                release.set()
                collecting.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await collecting
        finally:
            release.set()
            await asyncio.to_thread(client.close)


def asked(folder: Path) -> dict[str, Any]:
    done = CliRunner().invoke(cli, ["runs", "show", "--in-flight", str(folder), "--json"])
    assert done.exit_code == 0, done.output
    return dict(json.loads(done.stdout))


async def until(folder: Path, right: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """What the command says, once it says this."""
    deadline = time.monotonic() + DEADLINE_S
    while not right(facts := await asyncio.to_thread(asked, folder)):
        assert time.monotonic() < deadline, facts
        await asyncio.sleep(0.2)
    return facts


async def test_it_tells_a_hanging_tool_from_a_hanging_engine_and_a_stopped_runtime(hanging: Hanging) -> None:
    def both(facts: dict[str, Any]) -> bool:
        return {p["where"] for p in facts["waiting_for"]} == {"agent or its tool", "model"}

    facts = await until(hanging.folder, both)
    by_input = {r["input_id"]: r for r in facts["rollouts"]}
    assert by_input["tool"]["stage"] == by_input["model"]["stage"] == "run"
    assert by_input["tool"]["stage_s"] > 0
    assert 0 < by_input["tool"]["left_s"] <= 200
    assert "there is no running model call" in by_input["tool"]["why"]
    assert "counting lamps" in "\n".join(by_input["tool"]["log"])
    assert f"{hanging.engine} has a model call of it for" in by_input["model"]["why"]
    shown = (
        await asyncio.to_thread(CliRunner().invoke, cli, ["runs", "show", "--in-flight", str(hanging.folder)])
    ).output
    assert "1 wait for agent or its tool" in shown
    assert "    | counting lamps" in shown

    os.kill(hanging.runtime.pid, signal.SIGSTOP)
    try:
        facts = await until(hanging.folder, lambda f: [p["where"] for p in f["waiting_for"]] == ["runtime"])
        [place] = facts["waiting_for"]
        assert place["rollouts"] == 2
        assert f"{hanging.runtime.url} does not answer" in place["why"]
    finally:
        os.kill(hanging.runtime.pid, signal.SIGCONT)


def test_a_run_without_rollouts_in_flight_says_so(tmp_path: Path) -> None:
    with RunWriter(tmp_path) as run:
        run.event("step", {"step": 0})
    assert "nothing is in flight" in asked(tmp_path)["note"]


def test_a_trainer_that_does_not_write_any_more_is_the_one_that_hangs(tmp_path: Path) -> None:
    with RunWriter(tmp_path) as run:
        run.event("step", {"step": 0})
    old = {"at_s": time.time() - 60, "pid": 2**22 + 5, "count": 0, "rollouts": [], "gateway": None}
    (tmp_path / IN_FLIGHT).write_text(json.dumps(old))
    assert "has ended, or waits for its gateway: its file is 60 s old" in asked(tmp_path)["note"]
