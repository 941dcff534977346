"""A batch on several gateways: real ones as processes, agents that call them, and one gateway that dies or hangs."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from agentcore_rl_toolkit.backends.collection.collect import collect_async
from agentcore_rl_toolkit.backends.collection.groups import Group, GroupRequest
from agentcore_rl_toolkit.backends.collection.settings import CollectConfig
from agentcore_rl_toolkit.contract import Cause, Outcome, Stage
from agentcore_rl_toolkit.errors import GatewayError
from agentcore_rl_toolkit.gateway import GatewayClient
from agentcore_rl_toolkit.gateway.http.client import request
from scripted_engine import ScriptedEngine

TURNS = 3


class Agents:
    """A runtime whose agents make three model calls and wait after the first until they may go on."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.calling = 0  # agents that have made a call

    def submit(
        self,
        payload: Mapping[str, Any],
        session_id: str | None = None,
        input_id: str | None = None,
        *,
        rollout_config: Mapping[str, Any] | None = None,
        deadlines: Any = None,
    ) -> Running:
        assert rollout_config is not None
        return Running(self, rollout_config, str(session_id))


class Running:
    """An agent's run; what fails in it becomes a record, as the agent side writes it."""

    stages: Mapping[str, float] = {}
    stage = Stage.RUN
    attempt = 1

    def __init__(self, agents: Agents, rollout: Mapping[str, Any], session_id: str) -> None:
        self.agents, self.rollout, self.session_id = agents, rollout, session_id

    async def result_async(self, timeout: float | None = None) -> dict[str, Any]:
        for turn in range(TURNS):
            body = {"messages": [{"role": "user", "content": f"turn {turn}"}]}
            url, key = self.rollout["base_url"] + "/chat/completions", self.rollout["api_key"]
            try:
                status, _ = await request("POST", url, body=body, key=key, timeout_s=600.0)
                assert status == 200
            except GatewayError as e:
                return {"status_code": 500, "stop_reason": f"no answer: {e}"}
            if turn == 0:
                self.agents.calling += 1
                await self.agents.go_on.wait()
        return {"status_code": 200, "rewards": 1.0}

    async def cancel_async(self) -> bool:
        return True


class Gateways:
    def __init__(self, client: GatewayClient, processes: Mapping[str, subprocess.Popen[bytes]]) -> None:
        self.client, self.processes = client, processes


@pytest.fixture
async def gateways(tmp_path: Path) -> AsyncIterator[Gateways]:
    line = [sys.executable, "-m", "agentcore_rl_toolkit.cli", "gateway", "serve", "--engine", "vllm", "--no-admin-key"]
    processes: list[subprocess.Popen[bytes]] = []
    async with ScriptedEngine() as engine:
        line += ["--upstream", engine.url, "--parent-pid", str(os.getpid()), "--ready-file"]
        files = [tmp_path / f"{name}.json" for name in ("first", "second")]
        try:
            for file in files:
                processes.append(subprocess.Popen([*line, str(file)], stderr=subprocess.DEVNULL))  # noqa: ASYNC220
            async with asyncio.timeout(60):
                while not all(file.exists() for file in files):
                    assert all(process.poll() is None for process in processes)
                    await asyncio.sleep(0.02)
            urls = [json.loads(file.read_text())["url"] for file in files]
            yield Gateways(GatewayClient(urls, timeout_s=10.0), dict(zip(urls, processes, strict=True)))
        finally:
            for process in processes:
                process.kill()
                process.wait()


async def batch(gateways: Gateways, how: signal.Signals) -> tuple[list[Group], str, Agents]:
    """Ten rollouts, of which six run when a gateway is killed or stopped. Returns them, and the URL of that gateway."""
    agents = Agents()
    requests = [GroupRequest(input_id=f"p{i}", payload={}, n=5) for i in range(2)]
    config = CollectConfig(max_concurrent=6, rollout_timeout_s=300.0, gateway_patience_s=1.0)
    running = asyncio.ensure_future(collect_async(requests, client=agents, gateway=gateways.client, config=config))
    async with asyncio.timeout(60):
        while agents.calling < 6:  # noqa: ASYNC110  (other processes)
            await asyncio.sleep(0.01)
    url = gateways.client.urls[0]
    gateways.processes[url].send_signal(how)
    try:
        async with asyncio.timeout(60):
            while url not in await gateways.client.away_async():  # noqa: ASYNC110  (another process)
                await asyncio.sleep(0.05)
        agents.go_on.set()
        async with asyncio.timeout(60):
            return await running, url, agents
    finally:
        running.cancel()
        gateways.processes[url].send_signal(signal.SIGCONT)


@pytest.mark.parametrize(
    "how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.system)], ids=["killed", "hanging"]
)
async def test_a_gateway_that_is_lost_costs_the_rollouts_that_ran_on_it_and_nothing_else(
    gateways: Gateways, how: signal.Signals, caplog: pytest.LogCaptureFixture
) -> None:
    groups, url, agents = await batch(gateways, how)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    assert len({rollout.session_id for rollout in rollouts}) == 10
    ended = Counter((rollout.outcome, rollout.cause) for rollout in rollouts)
    lost = ended[Outcome.LOST, Cause.INFRASTRUCTURE]
    assert 1 <= lost <= 5  # those that had begun there; those that had not went to the other one
    assert ended == {(Outcome.LOST, Cause.INFRASTRUCTURE): lost, (Outcome.OK, None): 10 - lost}
    assert agents.calling == 10
    for rollout in rollouts:
        if rollout.outcome is Outcome.OK:
            assert rollout.usable
            assert len(rollout.capture.turns) == TURNS
        else:
            assert url in str(rollout.error)
            assert rollout.mask_reason == "outcome"
            assert rollout.trajectory is None
    assert f"gateway {url} does not answer" in caplog.text
    left = gateways.client.urls[1:]
    assert [(await GatewayClient(each).stats_async())["sessions"] for each in left] == [0] * len(left)
