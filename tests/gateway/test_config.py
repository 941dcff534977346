"""What a gateway refuses to be started with."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agentcore_rl_toolkit.errors import ConfigError
from agentcore_rl_toolkit.gateway import Gateway, GatewayConfig, UpstreamConfig


def test_an_admin_key_that_everyone_has_or_nobody_can_send_is_refused() -> None:
    for key in ("", " ", "two words", "line\nbreak", "schl\u00fcssel"):
        with pytest.raises(ConfigError, match="admin key"):
            GatewayConfig(host="0.0.0.0", admin_key=key)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"url": "http://[::1"}, "must look like"),
        ({"url": "http://h:99999"}, "must look like"),
        ({"url": "http://h", "api_key": ""}, "api key"),
        ({"url": "http://h", "api_key": "a\r\nx: y"}, "api key"),
    ],
)
def test_an_upstream_that_cannot_be_asked_is_refused(settings: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        UpstreamConfig(**settings)


def test_a_request_has_at_most_16_mebibytes_and_a_reply_64_unless_it_is_set() -> None:
    limits = GatewayConfig().limits
    assert (limits.body_bytes, limits.reply_bytes) == (16 * 2**20, 64 * 2**20)


@pytest.mark.parametrize("api_path", ["v1", "/v1", "/v1/"])
def test_slashes_around_an_api_path_do_not_count(api_path: str) -> None:
    upstream = UpstreamConfig(url="http://h:1/", api_path=api_path)
    assert upstream.url_of("/v1/models") == "http://h:1/v1/models"
    assert upstream.url_of("/health") == "http://h:1/health"


def test_a_ready_file_that_cannot_be_written_ends_the_command_and_leaves_no_key(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    line = [sys.executable, "-m", "agentcore_rl_toolkit", "gateway", "serve", "--upstream", "http://127.0.0.1:1"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    ended = subprocess.run(
        [*line, "--ready-file", str(tmp_path / "file" / "ready")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 1
    assert ended.stderr.startswith("error: ")
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith("gateway-")]


def test_sglang_takes_token_ids_alone() -> None:
    with pytest.raises(ConfigError, match="--model"):
        GatewayConfig(engine="sglang")


async def test_a_store_that_cannot_be_used_is_said_before_anything_is_served() -> None:
    with pytest.raises(ConfigError, match="cannot be used"):
        Gateway(GatewayConfig(store_dir="/proc/none"))
