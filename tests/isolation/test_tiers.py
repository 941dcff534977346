"""Which tier is used, and finding a container engine."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from agentcore_rl_toolkit.errors import ConfigError
from agentcore_rl_toolkit.isolation import tiers
from agentcore_rl_toolkit.isolation.engines import find_engine


@pytest.fixture
def without_programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    tiers.no_sandbox.cache_clear()
    monkeypatch.setenv("PATH", os.path.dirname(sys.executable))
    for name in ("DOCKER_HOST", "CONTAINER_HOST", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    yield
    tiers.no_sandbox.cache_clear()


def test_without_bubblewrap_the_default_is_none_with_the_reason_and_process_is_refused(without_programs: None) -> None:
    tier, why = tiers.choose_tier()
    assert tier == "none"
    assert "bwrap" in str(why).lower()
    with pytest.raises(ConfigError, match="isolation 'process' is not available here"):
        tiers.choose_tier("process")
    with pytest.raises(ConfigError, match="must be process, none, container or auto"):
        tiers.choose_tier("landlock")
    assert tiers.choose_tier("none") == ("none", None)


class Podman(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = json.dumps({"Components": [{"Name": "Podman Engine"}]}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        return None


def test_the_engine_that_docker_host_names_is_asked_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Podman) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("DOCKER_HOST", f"tcp://127.0.0.1:{server.server_port}")
        assert find_engine().name == "podman"
        server.shutdown()


def test_without_an_engine_the_error_says_what_to_install(without_programs: None) -> None:
    if any(Path(path).exists() for path in ("/var/run/docker.sock", "/run/podman/podman.sock")):
        pytest.skip("an engine listens at its usual place")
    with pytest.raises(ConfigError, match=r"podman is not on PATH.*apt-get install podman"):
        find_engine()
