"""Every server of the project, as a process, against web pages and callers without its key."""

from __future__ import annotations

import contextlib
import functools
import json
import socket
import stat
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import boto3
import botocore.session
import openai
import pytest

from agentcore_rl_toolkit._servers.keys import key_for
from agentcore_rl_toolkit.errors import GatewayError
from agentcore_rl_toolkit.gateway import GatewayClient
from agentcore_rl_toolkit.runtime.remote import RuntimeView
from agentcore_rl_toolkit.weights.engines import POLICY_KEY
from serving import serving as started

WITHIN_S = 60.0
AGENT = Path(__file__).parent / "runtime" / "deployable" / "bare.py"


@dataclass
class Served:
    """A running server and a path that anybody may GET."""

    name: str
    url: str
    probe: str
    ready: dict[str, Any]

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        return parts.hostname or "", parts.port or 0


SERVERS = {
    "gateway": (("gateway", "serve"), "/healthz"),
    "policy": (("policy", "serve"), "/health"),
    "runtime": (("runtime", "serve", "--agent", f"probe={AGENT}"), "/_local/metrics"),
}


@contextlib.contextmanager
def serving(name: str, folder: Path, *options: str) -> Iterator[Served]:
    words, probe = SERVERS[name]
    with started(folder, *words, *options) as ready:
        yield Served(name, ready["url"], probe, ready)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Served]]:
    """One server of each kind for the tests that leave it as it was, started when the first of them asks for it."""
    with contextlib.ExitStack() as running:

        @functools.cache
        def start(name: str) -> Served:
            return running.enter_context(serving(name, tmp_path_factory.mktemp(name)))

        yield start


@pytest.fixture(params=["gateway", "runtime", pytest.param("policy", marks=pytest.mark.system)])
def served(request: pytest.FixtureRequest, server: Callable[[str], Served]) -> Served:
    return server(request.param)


def ask(
    served: Served, *headers: str, method: str = "GET", path: str | None = None, body: bytes = b""
) -> tuple[int, str]:
    """Status and body of the response to a request with these headers, besides Host where there is none."""
    lines = [f"{method} {path or served.probe} HTTP/1.1", *headers]
    if not any(h.lower().startswith("host:") for h in headers):
        lines.append(f"Host: {served.address[0]}:{served.address[1]}")
    lines += ["Connection: close", f"Content-Length: {len(body)}", "", ""]
    with socket.create_connection(served.address, timeout=WITHIN_S) as sock:
        sock.sendall("\r\n".join(lines).encode() + body)
        return _response(sock)


def _response(sock: socket.socket) -> tuple[int, str]:
    received = b""
    with contextlib.suppress(ConnectionError):
        while piece := sock.recv(65536):
            received += piece
    head, _, body = received.partition(b"\r\n\r\n")
    return int(head.split(b" ")[1]) if head else 0, body.decode(errors="replace")


# -- web pages


def test_a_foreign_host_is_refused(served: Served) -> None:
    for host in ("evil.example", f"evil.example:{served.address[1]}", f"127.0.0.1.evil.example:{served.address[1]}"):
        status, body = ask(served, f"Host: {host}")
        assert status == 421
        assert "--allowed-host" in body


def test_a_foreign_origin_is_refused_whatever_is_asked(served: Served) -> None:
    own = f"http://127.0.0.1:{served.address[1]}"
    for origin in (
        "http://evil.example",
        "null",
        "http://127.0.0.1:1",
        f"http://localhost:{served.address[1]}",
        "file://",
    ):
        for method in ("GET", "POST", "DELETE"):
            status, body = ask(served, f"Origin: {origin}", "Content-Type: text/plain", method=method, body=b"{}")
            assert status == 403, (origin, method)
            assert "--allowed-host" in body
    status, body = ask(served, f"Origin: {own}")
    assert "--allowed-host" not in body


# -- bounds


def test_a_head_above_its_bound_is_refused(served: Served) -> None:
    """The head has no end, so only its size can end the connection."""
    with socket.create_connection(served.address, timeout=WITHIN_S) as sock:
        with contextlib.suppress(ConnectionError):
            sock.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX-Large: " + b"x" * 2**20)
        assert _response(sock)[0] in (0, 400)  # 0: the connection was reset before the response was read


# -- keys


def test_a_gateway_is_administered_with_its_key_only(tmp_path: Path) -> None:
    with serving("gateway", tmp_path) as served:
        for method, path in (
            ("POST", "/admin/sessions"),
            ("POST", "/admin/fetch"),
            ("POST", "/admin/delete"),
            ("POST", "/admin/workers"),
            ("POST", "/admin/pause"),
            ("POST", "/admin/weight_version"),
            ("GET", "/admin/stats"),
            ("GET", "/metrics"),
            ("GET", "/sessions/x/traces"),
            ("POST", "/sessions"),
            ("DELETE", "/admin/workers/x"),
        ):
            assert ask(served, method=method, path=path, body=b"{}")[0] == 401, path
            assert ask(served, "Authorization: Bearer guess", method=method, path=path, body=b"{}")[0] == 401, path
        key_file = Path(served.ready["admin_key_file"])
        assert stat.S_IMODE(key_file.stat().st_mode) == 0o600
        assert stat.S_IMODE((tmp_path / "gateway.json").stat().st_mode) == 0o600
        assert json.loads(key_file.read_text())["key"] not in (tmp_path / "gateway.log").read_text()
        with GatewayClient(served.url) as client:  # of the same user: it finds the key
            client.set_weight_version(3)
            assert client.create_sessions(["one"])[0].session_id == "one"
        with GatewayClient(served.url.replace("127.0.0.1", "localhost")) as client:
            assert client.fetch(["one"])
        with GatewayClient(served.url, admin_key="guess") as client, pytest.raises(GatewayError):
            client.stats()
    assert not key_file.exists()


def test_a_runtime_is_used_with_its_key_only(server: Callable[[str], Served], monkeypatch: pytest.MonkeyPatch) -> None:
    served = server("runtime")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):  # they win over the file's
        monkeypatch.delenv(name, raising=False)
    arn = served.ready["agents"]["probe"]
    for method, path in (
        ("GET", "/_local/sessions"),
        ("POST", "/runtimes/"),
        ("POST", f"/runtimes/{quote(arn, safe='')}/invocations"),
    ):
        assert ask(served, method=method, path=path, body=b"{}")[0] == 403, path
    file = Path(served.ready["credentials_file"])
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert RuntimeView(served.url).sessions() == []  # of the same user: it finds the key
    session = botocore.session.Session()
    session.set_config_variable("credentials_file", str(file))
    client = boto3.Session(botocore_session=session).client(
        "bedrock-agentcore", endpoint_url=served.url, region_name="us-west-2"
    )
    assert client.invoke_agent_runtime(agentRuntimeArn=arn, payload=b"{}")["response"].read()


@pytest.mark.system
def test_a_policy_is_changed_with_its_key_only(server: Callable[[str], Served]) -> None:
    served = server("policy")
    for headers in ((), ("Authorization: Bearer guess",)):
        status, body = ask(served, *headers, method="POST", path="/update_weights", body=b"{}")
        assert status == 401
        assert "AGENTCORE_RL_POLICY_ADMIN_KEY" in body
    assert stat.S_IMODE(Path(served.ready["admin_key_file"]).stat().st_mode) == 0o600
    key = key_for("policy", served.url, POLICY_KEY)
    assert key
    assert ask(served, f"Authorization: Bearer {key}", method="POST", path="/update_weights", body=b"{}")[0] == 400


# -- clients as they are


@pytest.mark.system
def test_unmodified_clients_are_served_under_every_name_of_this_machine(server: Callable[[str], Served]) -> None:
    policy, gateway = (server(name).url.replace("127.0.0.1", "localhost") for name in ("policy", "gateway"))
    with openai.OpenAI(base_url=f"{policy}/v1", api_key="none") as client:
        assert [model.id for model in client.models.list()] == ["policy"]
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"{gateway}/sessions/unknown/v1/models", timeout=WITHIN_S)
    with refused.value as response:
        assert response.code == 404
