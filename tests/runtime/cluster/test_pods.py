"""`runtime serve --cluster kubernetes` through unmodified boto3: the API server is scripted, its pods are real processes."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from botocore.exceptions import ClientError

from agentcore_rl_toolkit.contract import new_session_id
from agentcore_rl_toolkit.errors import LocalRuntimeError
from agentcore_rl_toolkit.runtime.cluster.pods import KubernetesPods, PodSettings
from agentcore_rl_toolkit.runtime.config import RuntimeConfig

from ..conftest import AGENTS, Server, wait_for
from .api_server import TOKEN, PodServer

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pods have loopback addresses of their own")


class Router(Server):
    """A runtime whose sessions are pods."""

    def __init__(self, folder: Path, api: PodServer, *options: str) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "token").write_text(TOKEN)
        self.folder, self.ready_file, self.output = folder, folder / "ready.json", folder / "output.txt"
        self.ready_file.unlink(missing_ok=True)
        command = [sys.executable, "-m", "agentcore_rl_toolkit.cli", "runtime", "serve", "--cluster", "kubernetes"]
        cluster = ["--kube-api", api.url, "--kube-namespace", "rollouts", "--kube-token-file", str(folder / "token")]
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [*command, *cluster, "--warm-pool", "probe=math", "--ready-file", str(self.ready_file), *options],
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self.wait_ready()

    def claim_of(self, session_id: str) -> str:
        found = self.session(session_id)
        assert found is not None
        return str(found["node"]).removeprefix("pod-")


@pytest.fixture
def api(tmp_path: Path) -> Iterator[PodServer]:
    server = PodServer(AGENTS / "probe.py", tmp_path)
    yield server
    server.close()


@pytest.fixture
def start(tmp_path: Path, api: PodServer) -> Iterator[Callable[..., Router]]:
    routers: list[Router] = []

    def make(*options: str) -> Router:
        routers.append(Router(tmp_path / f"router{len(routers)}", api, "--stop-grace", "5", *options))
        return routers[-1]

    yield make
    for router in routers:
        router.stop()


def code_of(error: pytest.ExceptionInfo[ClientError]) -> tuple[int, str]:
    return error.value.response["ResponseMetadata"]["HTTPStatusCode"], error.value.response["Error"]["Code"]


def test_session_is_a_pod_that_keeps_its_id_streams_and_goes_with_a_stop(
    api: PodServer, start: Callable[..., Router]
) -> None:
    router = start()
    a, b = new_session_id(), new_session_id()
    first, again, other = router.invoke({}, a), router.invoke({}, a), router.invoke({}, b)
    assert [first["calls"], again["calls"], other["calls"]] == [1, 2, 1]
    assert first["session"] == a
    assert {first["pid"], other["pid"]} == {p.pid for p in api.pods.values()}
    claim = api.claims[router.claim_of(a)]
    assert claim["spec"]["warmPoolRef"] == {"name": "math"}
    assert claim["spec"]["lifecycle"]["shutdownPolicy"] == "Delete"
    reply = router.default_client.invoke_agent_runtime(
        agentRuntimeArn=router.arn, runtimeSessionId=a, payload=b'{"do": "stream", "n": 3}'
    )
    lines = [line for line in reply["response"].iter_lines() if line]
    assert [json.loads(line.removeprefix(b"data: "))["i"] for line in lines] == [0, 1, 2]
    events = router.default_client.invoke_agent_runtime_command(
        agentRuntimeArn=router.arn, runtimeSessionId=a, body={"command": "ls"}
    )["stream"]
    assert [e["chunk"] for e in events][-1]["contentStop"]["exitCode"] == -1
    [pool] = router.view.get("/_local/nodes")["nodes"]
    assert (pool["node_id"], pool["state"], pool["sessions"]) == ("math", "ready", 2)
    with pytest.raises(LocalRuntimeError, match="kubectl"):
        list(router.view.log(a))
    router.default_client.stop_runtime_session(agentRuntimeArn=router.arn, runtimeSessionId=a)
    wait_for(lambda: len(api.alive()) == 1)
    wait_for(lambda: len(api.claims) == 1)
    assert router.stop() == 0
    api.settle()
    assert not api.claims


def test_pod_that_is_gone_is_a_lost_session_and_one_that_ended_a_crashed_one(
    api: PodServer, start: Callable[..., Router]
) -> None:
    router = start()
    ended, deleted, stays = (new_session_id() for _ in range(3))
    for session_id in (ended, deleted, stays):
        router.invoke({}, session_id)
    with pytest.raises(ClientError) as error:
        router.invoke({"do": "die"}, ended)
    assert code_of(error) == (424, "RuntimeClientError")
    victim = router.claim_of(deleted)
    api.kill(victim)
    del api.claims[victim]  # somebody deleted it
    wait_for(lambda: router.session(deleted) is None)
    assert wait_for(lambda: router.ended(ended))["state"] == "crashed"
    lost = router.ended(deleted)
    assert lost is not None
    assert (lost["state"], "its claim is gone" in lost["error"]) == ("lost", True)
    assert router.invoke({}, deleted)["calls"] == 1  # the id starts a fresh pod
    assert router.invoke({}, stays)["calls"] == 2
    wait_for(lambda: len(api.claims) == 2)  # also the claims of those two were removed


def test_no_room_is_402_and_a_drained_pool_takes_no_more(api: PodServer, start: Callable[..., Router]) -> None:
    api.capacity = 1
    router = start()
    session_id = new_session_id()
    router.invoke({}, session_id)
    for _ in range(2):  # the quota's own word; then, for a moment, at once
        with pytest.raises(ClientError) as error:
            router.invoke({})
        assert code_of(error) == (402, "ServiceQuotaExceededException")
    router.default_client.stop_runtime_session(agentRuntimeArn=router.arn, runtimeSessionId=session_id)
    wait_for(lambda: not api.claims)
    time.sleep(2.0)
    session_id = new_session_id()
    assert router.invoke({}, session_id)["calls"] == 1
    api.capacity = 10
    drained = json.loads(router.view.call("POST", "/_local/nodes/math/drain"))
    assert drained["state"] == "draining"
    with pytest.raises(ClientError) as error:
        router.invoke({})
    assert code_of(error) == (402, "ServiceQuotaExceededException")
    assert router.invoke({}, session_id)["calls"] == 2
    router.default_client.stop_runtime_session(agentRuntimeArn=router.arn, runtimeSessionId=session_id)
    wait_for(lambda: router.view.get("/_local/nodes")["nodes"][0]["state"] == "drained")


def test_pod_that_does_not_come_is_424_and_leaves_no_claim(api: PodServer, start: Callable[..., Router]) -> None:
    api.pending = True
    router = start("--init-timeout", "1.5")
    with pytest.raises(ClientError) as error:
        router.invoke({})
    assert code_of(error) == (424, "RuntimeClientError")
    wait_for(lambda: not api.claims)
    api.settle()


def test_router_that_comes_back_removes_what_its_killed_predecessor_left(
    api: PodServer, start: Callable[..., Router], tmp_path: Path
) -> None:
    state = ("--state-dir", str(tmp_path / "state"))
    first = start(*state)
    first.invoke({}, new_session_id())
    api.claims["another-routers"] = {
        "metadata": {"name": "another-routers", "labels": {"app.kubernetes.io/managed-by": "agentcore-rl"}}
    }
    first.stop(signal.SIGKILL)
    assert len(api.alive()) == 1  # Kubernetes does not know that its router is gone
    second = start(*state)
    api.settle()
    assert second.arn == first.arn
    assert second.invoke({}, new_session_id())["calls"] == 1
    assert "another-routers" in api.claims


def serve(*options: str) -> Any:
    command = [
        sys.executable,
        "-m",
        "agentcore_rl_toolkit.cli",
        "runtime",
        "serve",
        "--cluster",
        "kubernetes",
        *options,
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--warm-pool", "a=b"], "not a pod"),
        (["--kube-api", "http://127.0.0.1:9", "--warm-pool", "a=b"], "--kube-namespace"),
        (["--kube-api", "http://127.0.0.1:9", "--kube-namespace", "n", "--warm-pool", "a=b"], "was not reached"),
        (["--kube-api", "http://127.0.0.1:9", "--kube-namespace", "n"], "--warm-pool"),
        (["--warm-pool", "=b"], "NAME=POOL"),
        (["--agent", f"probe={AGENTS / 'probe.py'}"], "--warm-pool"),
        (["--ray-address", "127.0.0.1:1"], "--ray-address"),
    ],
)
def test_what_cannot_work_is_said_at_once(options: list[str], words: str) -> None:
    done = serve(*options)
    assert done.returncode == 2, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr


class Lost:
    """A session's pod that the API server does not know any more."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.started, self.ended = loop.create_future(), loop.create_future()
        self.started.set_result(0)

    def gone(self, why: str | None) -> None:
        self.ended.set_result(why)


async def test_an_answer_that_cannot_be_read_keeps_no_lost_pod_from_being_found(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Answers:
        failures: ClassVar[list[Exception]] = [KeyError("items")]

        async def list_async(self, labels: dict[str, str]) -> list[Any]:
            if self.failures:
                raise self.failures.pop()
            return []

    client: Any = Answers()
    pods = KubernetesPods(RuntimeConfig(), client, PodSettings(pools={"a": "math"}, poll_s=0.01))
    lost: Any = Lost()
    pods._processes["lost"] = lost
    watching = asyncio.create_task(pods._watch())
    try:
        assert "its claim is gone" in await asyncio.wait_for(lost.ended, 30)
    finally:
        watching.cancel()
    assert "looking for the pods failed" in caplog.text
