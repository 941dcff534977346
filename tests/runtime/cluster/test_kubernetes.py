"""The client of agent-sandbox resources against a scripted API server that speaks HTTP and the API's JSON."""

from __future__ import annotations

import re
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from agentcore_rl_toolkit.errors import ConfigError, MissingExtraError
from agentcore_rl_toolkit.runtime.cluster import kubernetes
from agentcore_rl_toolkit.runtime.cluster.kubernetes import (
    ApiServer,
    Claim,
    ClaimExistsError,
    ClaimFailedError,
    ClaimNotFoundError,
    ClaimTimeoutError,
    ForbiddenError,
    KubernetesError,
    QuotaError,
    SandboxClient,
    claim_name,
)

from .api_server import CLAIMS, TOKEN, Reply, ScriptedServer, condition, failure


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    server = ScriptedServer()
    yield server
    server.close()


@pytest.fixture
async def client(server: ScriptedServer, tmp_path: Path) -> AsyncIterator[SandboxClient]:
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    client = SandboxClient(
        ApiServer(url=server.url, namespace="rollouts", token_file=tmp_path / "token", timeout_s=5.0)
    )
    yield client
    await client.close()


async def test_claim_per_session_names_its_pool_session_and_end(client: SandboxClient, server: ScriptedServer) -> None:
    claim = await client.create_async("Roll_out/7", warm_pool="math", max_lifetime_s=3600, labels={"run": "r1"})
    assert claim == Claim(
        name=claim_name("Roll_out/7"),
        session_id="Roll_out/7",
        ready=False,
        finished=False,
        deleting=False,
        sandbox=None,
    )
    [(method, path, body)] = server.requests
    assert (method, path) == ("POST", CLAIMS)
    assert body["apiVersion"] == "extensions.agents.x-k8s.io/v1beta1"
    assert body["spec"]["warmPoolRef"] == {"name": "math"}
    assert body["spec"]["lifecycle"]["shutdownPolicy"] == "Delete"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", body["spec"]["lifecycle"]["shutdownTime"])
    assert body["metadata"]["labels"] == {"run": "r1", "app.kubernetes.io/managed-by": "agentcore-rl"}


async def test_wait_ends_when_the_sandbox_is_ready_and_has_an_address(
    client: SandboxClient, server: ScriptedServer
) -> None:
    states = [
        None,
        {"conditions": [condition("Ready", "False", "DependenciesNotReady")]},
        {"conditions": [condition("Ready", "True")], "sandbox": {"name": "math-x7"}},
        {"conditions": [condition("Ready", "True")], "sandbox": {"name": "math-x7", "podIPs": ["10.0.0.7"]}},
    ]

    def advance(claim: dict[str, Any]) -> None:
        state = states.pop(0)
        if state is not None:
            claim["status"] = state

    server.on_get = advance
    created = await client.create_async("one", warm_pool="math")
    claim = await client.wait_ready_async(created.name, timeout_s=10)
    assert (claim.sandbox, claim.pod_ips, claim.session_id) == ("math-x7", ("10.0.0.7",), "one")
    assert not states


@pytest.mark.parametrize("timeout_s", [0.0, 0.4])
async def test_wait_past_its_limit_says_what_was_missing(
    client: SandboxClient, server: ScriptedServer, timeout_s: float
) -> None:
    created = await client.create_async("one", warm_pool="math")
    server.claims[created.name]["status"] = {"conditions": [condition("Ready", "False", "DependenciesNotReady")]}
    with pytest.raises(ClaimTimeoutError, match="DependenciesNotReady") as raised:
        await client.wait_ready_async(created.name, timeout_s=timeout_s)
    assert isinstance(raised.value, TimeoutError)
    gets = sum(method == "GET" for method, _, _ in server.requests)
    assert gets == 1 if timeout_s == 0 else gets > 1


@pytest.mark.parametrize("how", ["finished", "deleting", "gone"])
async def test_wait_for_a_sandbox_that_ended_does_not_last(
    client: SandboxClient, server: ScriptedServer, how: str
) -> None:
    created = await client.create_async("one", warm_pool="math")
    if how == "finished":
        server.claims[created.name]["status"] = {"conditions": [condition("Finished", "True", "PodFailed")]}
    elif how == "deleting":
        server.claims[created.name]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    else:
        del server.claims[created.name]
    expected = ClaimNotFoundError if how == "gone" else ClaimFailedError
    with pytest.raises(expected):
        await client.wait_ready_async(created.name, timeout_s=30)


async def test_wait_rides_out_a_server_that_is_busy_or_unwell(client: SandboxClient, server: ScriptedServer) -> None:
    created = await client.create_async("one", warm_pool="math")
    server.claims[created.name]["status"] = {
        "conditions": [condition("Ready", "True")],
        "sandbox": {"podIPs": ["10.0.0.1"]},
    }
    server.script = [
        failure(429, "TooManyRequests", "slow down", **{"Retry-After": "0.2"}),
        failure(500, "InternalError", "etcd is away"),
        (200, {}, b"<html>a proxy</html>"),
    ]
    assert (await client.wait_ready_async(created.name, timeout_s=10)).ready
    assert not server.script


async def test_list_reads_every_page_and_only_ours(client: SandboxClient, server: ScriptedServer) -> None:
    server.page = 2
    for number in range(5):
        await client.create_async(f"session-{number}", warm_pool="math")
    server.claims["somebody"] = {"metadata": {"name": "somebody", "labels": {}}, "spec": {}}
    assert sorted(c.session_id or "" for c in await client.list_async()) == [f"session-{n}" for n in range(5)]


async def test_delete_removes_once_and_says_when_there_was_nothing(
    client: SandboxClient, server: ScriptedServer
) -> None:
    created = await client.create_async("one", warm_pool="math")
    assert await client.delete_async(created.name, grace_s=5) is True
    assert server.requests[-1][2]["gracePeriodSeconds"] == 5
    assert await client.delete_async(created.name) is False
    assert not server.claims


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (failure(403, "Forbidden", "sandboxclaims is forbidden: User cannot create resource"), ForbiddenError),
        (failure(403, "Forbidden", "exceeded quota: claims, requested: count=1, used: 10, limited: 10"), QuotaError),
        (failure(429, "TooManyRequests", "too many", **{"Retry-After": "3"}), QuotaError),
        (failure(404, "NotFound", "the server could not find the requested resource"), ClaimNotFoundError),
        (failure(422, "Invalid", "spec.warmPoolRef: Required value"), KubernetesError),
        (failure(500, "InternalError", "etcd"), KubernetesError),
        ((502, {}, b"<html>bad gateway</html>"), KubernetesError),
        ((200, {}, []), KubernetesError),
        ((200, {}, {"kind": "Status"}), KubernetesError),
    ],
)
async def test_errors_have_types(client: SandboxClient, server: ScriptedServer, reply: Reply, expected: type) -> None:
    server.script = [reply]
    with pytest.raises(KubernetesError) as raised:
        await client.create_async("one", warm_pool="math")
    assert type(raised.value) is expected
    if reply[0] >= 400:
        assert raised.value.status == reply[0]
    if reply[0] == 429:
        assert raised.value.retry_after_s == 3.0  # type: ignore[attr-defined]


async def test_same_session_twice_is_refused(client: SandboxClient) -> None:
    await client.create_async("one", warm_pool="math")
    with pytest.raises(ClaimExistsError):
        await client.create_async("one", warm_pool="math")


async def test_token_is_read_for_each_request(client: SandboxClient, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("expired")
    with pytest.raises(ForbiddenError):
        await client.list_async()
    (tmp_path / "token").write_text(TOKEN)
    assert await client.list_async() == []


async def test_silent_server_is_an_error_in_time() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        client = SandboxClient(ApiServer(url=url, namespace="n", timeout_s=0.2))
        with pytest.raises(KubernetesError, match="was not reached") as raised:
            await client.list_async()
        assert raised.value.status is None
        await client.close()


def test_address_and_token_of_the_pod_it_runs_in(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a pod"):
        ApiServer.in_pod({}, folder=tmp_path)
    (tmp_path / "namespace").write_text("rollouts\n")
    environment = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "6443"}
    server = ApiServer.in_pod(environment, folder=tmp_path)
    assert (server.url, server.namespace, server.token_file) == (
        "https://[fd00::1]:6443",
        "rollouts",
        tmp_path / "token",
    )


def test_token_is_not_sent_in_the_clear(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="plain http"):
        ApiServer(url="http://10.0.0.1", namespace="n", token_file=tmp_path / "token")
    with pytest.raises(ConfigError, match="address"):
        ApiServer(url="10.0.0.1:443", namespace="n")


@pytest.mark.parametrize("session_id", ["a", "A_B/c", "--", "x" * 256, "é" * 40, "rollout-0001-" + "9" * 30])
def test_names_are_labels_and_differ_where_sessions_do(session_id: str) -> None:
    name = claim_name(session_id)
    assert re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", name)
    assert claim_name(session_id + "x") != name
    assert claim_name(session_id) == name


def test_manifests_fit_the_client() -> None:
    """Group, version, kinds, port and rights in the shipped manifests are the ones the client uses."""
    text = (Path(__file__).parents[3] / "deploy" / "kubernetes" / "agent-sandbox.yaml").read_text()
    documents = [part for part in text.split("\n---\n") if "kind:" in part]
    kinds = {re.search(r"^kind: (\w+)", d, re.M)[1]: d for d in documents}  # type: ignore[index]
    assert {"SandboxTemplate", "SandboxWarmPool", "Role", "RoleBinding", "ServiceAccount"} <= set(kinds)
    version = f"apiVersion: {kubernetes.GROUP}/{kubernetes.VERSION}"
    assert version in kinds["SandboxTemplate"]
    assert version in kinds["SandboxWarmPool"]
    assert f'apiGroups: ["{kubernetes.GROUP}"]' in kinds["Role"]
    assert 'verbs: ["create", "get", "list", "delete"]' in kinds["Role"]
    assert "containerPort: 8080" in kinds["SandboxTemplate"]


def test_without_its_library_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes_asyncio", None)
    with pytest.raises(MissingExtraError, match=r"\[kubernetes\]"):
        SandboxClient(ApiServer(url="http://127.0.0.1:1", namespace="n"))
