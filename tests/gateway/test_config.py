"""What a gateway refuses to be started with."""

from __future__ import annotations

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


def test_sglang_takes_token_ids_alone() -> None:
    with pytest.raises(ConfigError, match="--model"):
        GatewayConfig(engine="sglang")


async def test_a_store_that_cannot_be_used_is_said_before_anything_is_served() -> None:
    with pytest.raises(ConfigError, match="cannot be used"):
        Gateway(GatewayConfig(store_dir="/proc/none"))
