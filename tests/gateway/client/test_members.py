"""How several gateways are named."""

from __future__ import annotations

import pytest

from agentcore_rl_toolkit.errors import ConfigError
from agentcore_rl_toolkit.gateway import GatewayClient


def test_urls_come_as_a_list_or_with_commas_and_each_once() -> None:
    assert GatewayClient("http://a/, http://b").urls == ("http://a", "http://b")
    assert GatewayClient(["http://a", "http://b/"]).url == "http://a,http://b"
    assert GatewayClient("http://a").public_urls == ("http://a",)
    assert GatewayClient("http://a,http://b", public_url=["http://c", "http://d"]).public_urls == (
        "http://c",
        "http://d",
    )
    for url in ("", [], "http://a,", ["http://a", "http://a/"]):
        with pytest.raises(ConfigError):
            GatewayClient(url)
    with pytest.raises(ConfigError, match="2 gateways and 1 public"):
        GatewayClient("http://a,http://b", public_url="http://c")
