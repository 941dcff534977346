"""The runtime over a real Ray cluster: several raylets on this machine, unmodified boto3 in front."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from agentcore_rl_toolkit.contract import new_session_id

from ..conftest import AGENTS, Server, alive, wait_for
from .conftest import RayCluster

# Starting Ray takes most of a minute on two busy cores.
pytestmark = [pytest.mark.system, pytest.mark.timeout(800)]


class Router(Server):
    """`runtime serve --cluster ray` with the Python that has Ray."""

    def __init__(self, folder: Path, cluster: RayCluster, *options: str) -> None:
        options = ("--ray", cluster.address, "--set", "stop_grace=2", *options)
        cache = {"AGENTCORE_RL_CACHE": str(folder / "cache")}
        super().__init__(folder, *options, python=cluster.python, **cluster.environment, **cache)

    def nodes(self, state: str = "ready") -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.view.get("/_local/nodes")["nodes"]
        return [node for node in found if node["state"] == state]

    def pid_of(self, session_id: str) -> int:
        """As this machine counts: inside, a session may have a numbering of its own."""
        session = self.session(session_id)
        assert session is not None
        return int(session["pid"])

    def node_of(self, session_id: str) -> str:
        session = self.session(session_id)
        assert session is not None
        return str(session["node"])


@pytest.fixture
def router(tmp_path: Path, ray_cluster: RayCluster) -> Iterator[Router]:
    router = Router(tmp_path, ray_cluster)
    yield router
    if router.process.poll() is None:
        router.process.terminate()
        try:
            assert router.process.wait(60) == 0, router.output.read_text()
        finally:
            router.process.kill()


def test_sessions_spread_over_the_nodes_and_keep_theirs(router: Router) -> None:
    wait_for(lambda: len(router.nodes()) == 2, within_s=220)
    ids = [new_session_id() for _ in range(6)]
    first = {i: router.invoke({"do": "echo"}, i) for i in ids}
    places = {i: router.node_of(i) for i in ids}
    assert sorted(Counter(places.values()).values()) == [3, 3]
    again = {i: router.invoke({"do": "echo"}, i) for i in ids}
    assert {i: (r["pid"], r["calls"]) for i, r in again.items()} == {i: (r["pid"], 2) for i, r in first.items()}
    assert {n["sessions"] for n in router.nodes()} == {3}
    command = router.default_client.invoke_agent_runtime_command(
        agentRuntimeArn=router.arn, runtimeSessionId=ids[0], body={"command": "echo here"}
    )
    assert "here" in str(list(command["stream"]))
    assert all(n["capacity"] >= 3 for n in router.nodes())

    reply = router.default_client.invoke_agent_runtime(
        agentRuntimeArn=router.arn, runtimeSessionId=ids[0], payload=json.dumps({"do": "stream", "n": 5}).encode()
    )
    assert reply["response"].read().count(b"data:") == 5
    router.invoke({"do": "print", "text": "written on the node"}, ids[0])
    assert b"written on the node" in b"".join(t.encode() for t in router.view.log(ids[0], follow=False))

    deployed = router.view.deploy(AGENTS / "own_server.py", "own", {})
    answer = router.default_client.invoke_agent_runtime(
        agentRuntimeArn=deployed, runtimeSessionId=new_session_id(), payload=b"[1]"
    )
    assert json.loads(answer["response"].read()) == {"got": [1]}

    remaining = [n["pid"] for n in router.nodes()] + [router.pid_of(i) for i in ids]
    router.process.send_signal(signal.SIGTERM)
    assert router.process.wait(60) == 0, router.output.read_text()
    assert "Traceback" not in router.output.read_text()
    wait_for(lambda: not any(alive(pid) for pid in remaining))


@pytest.mark.nightly
def test_node_killed_under_load_loses_its_own_sessions_and_nothing_else(
    router: Router, ray_cluster: RayCluster
) -> None:
    wait_for(lambda: len(router.nodes()) == 2, within_s=220)
    ids = [new_session_id() for _ in range(8)]
    for i in ids:
        router.invoke({"do": "echo"}, i)
    pids = {i: router.pid_of(i) for i in ids}
    assert all(alive(pid) for pid in pids.values())
    places = {i: router.node_of(i) for i in ids}
    [doomed] = ray_cluster.raylets
    [safe] = {n["node_id"] for n in router.nodes()} - {doomed}
    agent = {n["node_id"]: n["pid"] for n in router.nodes()}[doomed]
    with ThreadPoolExecutor(len(ids)) as pool:
        client = router.client(max_pool_connections=20, read_timeout=60)
        calls: dict[str, Future[Any]] = {
            i: pool.submit(router.invoke, {"do": "sleep", "s": 6}, i, client=client) for i in ids
        }
        wait_for(lambda: sum(s["inflight"] for s in router.view.sessions()) == len(ids))
        ray_cluster.kill(doomed)
        os.kill(agent, signal.SIGKILL)
        for i in ids:
            if places[i] == safe:
                assert calls[i].result(60)["calls"] == 2
                continue
            with pytest.raises(ClientError) as raised:
                calls[i].result(60)
            assert raised.value.response["ResponseMetadata"]["HTTPStatusCode"] == 424
    wait_for(lambda: router.nodes("lost"))
    ended = {e["session_id"]: e["state"] for e in router.view.get("/_local/sessions")["ended"]}
    assert ended == {i: "lost" for i in ids if places[i] == doomed}
    assert [n["node_id"] for n in router.nodes("lost")] == [doomed]
    lost = next(i for i in ids if places[i] == doomed)
    assert router.invoke({"do": "echo"}, lost)["calls"] == 1
    assert router.node_of(lost) == safe
    wait_for(lambda: not any(alive(pids[i]) for i in ids if places[i] == doomed))

    [joined] = ray_cluster.ask(add=1)["raylets"]
    wait_for(lambda: joined in {n["node_id"] for n in router.nodes()}, within_s=60)
    new = new_session_id()
    router.invoke({"do": "echo"}, new)
    pids[new] = router.pid_of(new)
    assert router.node_of(new) == joined

    left = [pid for pid in [*pids.values(), *(n["pid"] for n in router.nodes())] if alive(pid)]
    assert len(left) >= 6
    router.process.kill()  # and the router itself: the nodes notice
    router.process.wait(10)
    wait_for(lambda: not any(alive(pid) for pid in left), within_s=40)
