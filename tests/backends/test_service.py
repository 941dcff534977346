"""Rollouts of a whole process: the pace is no failure, places are shared, a gateway that dies comes back with what it had."""

from __future__ import annotations

import asyncio
import errno
import math
import os
import signal
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from agentcore_rl_toolkit import RolloutClient
from agentcore_rl_toolkit.backends import _gateway_process, service
from agentcore_rl_toolkit.backends.collection.collect import collect_async
from agentcore_rl_toolkit.backends.collection.groups import Group, GroupRequest
from agentcore_rl_toolkit.backends.collection.settings import CollectConfig
from agentcore_rl_toolkit.backends.service import RolloutService, ServiceSettings
from agentcore_rl_toolkit.contract import Outcome
from agentcore_rl_toolkit.gateway import GatewayClient
from scripted_engine import ScriptedEngine
from scripted_runtime import ScriptedRuntime

from .recorded import Episode, Replay, recorded_episodes


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "t")


@pytest.fixture
def runtime() -> Iterator[ScriptedRuntime]:
    with ScriptedRuntime() as made:
        yield made


def settings(runtime: ScriptedRuntime | None, tmp_path: Path, **more: Any) -> ServiceSettings:
    where = {"agent_runtime_arn": runtime.arn, "endpoint_url": runtime.url} if runtime else {"agent_runtime_arn": "arn"}
    values = {"s3_bucket": f"file://{tmp_path}/records", "exp_id": "e", "model_id": "m", "gateway_host": "127.0.0.1"}
    return ServiceSettings(**{**values, **where, **more})


def script(**members: Any) -> dict[str, Any]:
    return {"script": {"result": {"rewards": 1.0}, **members}}


def ends(groups: list[Group]) -> Counter[tuple[str, str | None]]:
    return Counter((r.outcome.value, r.stage) for g in groups for r in g.rollouts)


async def test_waiting_for_the_pace_masks_nothing(runtime: ScriptedRuntime, tmp_path: Path) -> None:
    with RolloutClient(runtime.arn, f"file://{tmp_path}", "e", tps_limit=5, endpoint_url=runtime.url) as client:
        groups = await collect_async(
            [GroupRequest(input_id=f"p{i}", payload=script(), n=4) for i in range(5)],
            client=client,
            gateway=None,
            config=CollectConfig(
                submit_timeout_s=3.0, rollout_timeout_s=60.0
            ),  # the last turn comes after four seconds
        )
    assert ends(groups) == {("ok", None): 20}


async def test_a_prompt_at_a_time_shares_the_places_of_the_process(tmp_path: Path) -> None:
    replay = Replay([Episode(input_id="", record={"rewards": 1.0}, delay_s=0.05) for _ in range(24)], by_input=False)
    service = RolloutService(
        settings(None, tmp_path, max_concurrent=4, rollout_timeout_s=60), replay.client, replay.gateway
    )
    groups = await asyncio.gather(*(service.group(GroupRequest(input_id=f"p{i}", payload={}, n=4)) for i in range(6)))
    assert replay.peak_running == 4
    assert all(r.outcome is not Outcome.TIMEOUT for g in groups for r in g.rollouts)


async def test_a_rollout_that_is_over_sampled_is_the_usable_one(tmp_path: Path) -> None:
    turns = next(e for e in recorded_episodes() if e.kind == "single").turns
    episodes = [
        Episode(input_id="", turns=turns, record={"rewards": 1.0, "status_code": 200}, delay_s=delay_s)
        for delay_s in (60.0, 0.0)
    ]
    replay = Replay(episodes, by_input=False)
    service = RolloutService(settings(None, tmp_path, extra_rollouts=1), replay.client, replay.gateway)
    assert (await service.roll({"prompt": "p"})).usable


@pytest.mark.parametrize("payload", [{"x": math.nan}, {"x": b"ab"}, {"id": "Größe1"}, {"idx": 10**300}, {"id": "٣٤"}])
async def test_no_payload_ends_a_step(payload: dict[str, Any], tmp_path: Path) -> None:
    replay = Replay([Episode(input_id="", record={"rewards": 1.0})], by_input=False)
    rollout = await RolloutService(settings(None, tmp_path), replay.client, replay.gateway).roll(payload)
    sendable = not isinstance(payload.get("x"), (float, bytes))
    assert len(replay.invoked) == sendable
    assert not rollout.usable
    if not sendable:
        assert rollout.outcome is Outcome.INVALID
        assert "plain JSON" in str(rollout.error)


async def test_a_gateway_that_its_trainer_started_is_started_again_with_what_it_had(
    runtime: ScriptedRuntime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    made = settings(runtime, tmp_path, gateways=2, gateway_store=str(tmp_path / "turns"), gateway_patience_s=60)
    service = await asyncio.to_thread(RolloutService.open, made, lambda: ["http://127.0.0.1:9"], "vllm")
    try:
        gateway = service.gateway
        assert isinstance(gateway, GatewayClient)
        assert sorted(path.name for path in (tmp_path / "turns").iterdir()) == ["gateway-0", "gateway-1"]
        await gateway.set_weight_version_async(7)
        running = asyncio.gather(*(service.roll(script(run_s=3)) for _ in range(4)))
        async with asyncio.timeout(60):
            while [s["sessions"] for s in (await gateway.stats_async())["gateways"].values()] != [2, 2]:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        kept = service._children[0]
        first = kept.child.process
        assert os.getsid(first.pid) != os.getsid(0)  # Ctrl-C must not reach it
        start, full = _gateway_process.GatewayProcess._start, [OSError(errno.ENOSPC, "No space left on device")]

        def start_on_a_full_disk(process: Any, port: int) -> Any:
            if full:
                raise full.pop()
            return start(process, port)

        monkeypatch.setattr(_gateway_process.GatewayProcess, "_start", start_on_a_full_disk)
        os.kill(first.pid, signal.SIGKILL)
        assert (await service.roll(script())).capture is not None  # a session that is made meanwhile
        assert all(rollout.capture for rollout in await running)  # and those that the killed gateway had made
        assert kept.child.process is not first
        assert not full  # and the disk has room again
        async with asyncio.timeout(60):
            while {s["weight_version"] for s in (await gateway.stats_async())["gateways"].values()} != {7}:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
    finally:
        service.close()
    assert kept.child.process.poll() is not None
    assert [path for path in temporary.iterdir() if not path.name.startswith("agentcore-rl-keys-")] == []


async def test_the_engine_gets_its_name_of_the_model_whatever_an_agent_names(
    runtime: ScriptedRuntime, tmp_path: Path
) -> None:
    message = {"model": "us.anthropic.claude", "messages": [{"role": "user", "content": "hello"}]}
    async with ScriptedEngine() as engine:
        opened = (RolloutService.open, settings(runtime, tmp_path), lambda: [engine.url], "vllm")
        service = await asyncio.to_thread(*opened)
        try:
            assert isinstance(service.gateway, GatewayClient)
            [session] = await service.gateway.create_sessions_async(["s"])
            headers = {"authorization": f"Bearer {session.api_key}"}
            async with httpx.AsyncClient(headers=headers, timeout=60) as agent:
                await agent.post(f"{session.base_url}/chat/completions", json=message)
        finally:
            service.close()
    assert [call.body["model"] for call in engine.calls] == ["m"]


def test_gateways_have_ports_and_stores_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "GatewayProcess", lambda words, **how: (words, how))
    plain, several = settings(None, tmp_path, gateway_store="turns"), {"gateways": 2, "gateway_port": 9000}
    several |= {"gateway_model": "folder", "gateway_context_tokens": 512, "gateway_public_url": "http://a:1,http://b:2"}
    words, key = (
        ["--engine", "vllm", "--upstream", "http://e", "--model-id", "m"],
        {"AGENTCORE_RL_GATEWAY_ADMIN_KEY": "k"},
    )
    how = {"host": "127.0.0.1", "port": 0, "store": "turns", "environment": key}
    assert service._start(plain, 0, "vllm", ["http://e"], {"ADMIN": "k"}) == (words, how)
    words += ["--model", "folder", "--set", "context_tokens=512", "--allowed-host", "a", "--allowed-host", "b"]
    how |= {"port": 9001, "store": "turns/gateway-1"}
    assert service._start(plain.replace(**several), 1, "vllm", ["http://e"], {"ADMIN": "k"}) == (words, how)


def test_a_gateway_on_all_addresses_is_reached_at_this_machines_own() -> None:
    urls = service.GatewaySettings(gateway_host="0.0.0.0").public_urls(["http://127.0.0.1:9000/"])
    assert urls == (f"http://{service.own_address()}:9000",)


def test_a_run_begins_with_the_first_step_of_its_process(tmp_path: Path) -> None:
    replay = Replay([])
    made = RolloutService(settings(None, tmp_path), replay.client, replay.gateway)
    begun: list[dict[str, int]] = []
    made.recording = SimpleNamespace(forget=lambda **places: begun.append(places))  # type: ignore[assignment]
    for step in (3, 4):
        made.begins(step, evaluations_from=step + 1)
    assert begun == [{"from_step": 3, "evaluations_from": 4}]


def test_a_gateway_that_never_comes_back_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Ended:
        url, log = "http://127.0.0.1:9", tmp_path / "log"

        def wait(self, timeout: float | None = None) -> int:
            return 1

        poll = wait

        @property
        def process(self) -> Ended:
            return self

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(_gateway_process, "RESTARTS", 1)
    monkeypatch.setattr(_gateway_process.GatewayProcess, "_start", lambda *_: Ended())
    made = _gateway_process.GatewayProcess((), host="127.0.0.1", port=9, store=None, environment={})
    for keeper in [thread for thread in threading.enumerate() if thread.name == "agentcore-rl-gateway"]:
        keeper.join(20)  # it may have ended already
    assert "ended after 1 restarts and stays down" in caplog.text
    made.close()
