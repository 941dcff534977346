"""Which gateway gets a session, and how several are named."""

from __future__ import annotations

import pytest

from agentcore_rl_toolkit.errors import ConfigError
from agentcore_rl_toolkit.gateway import GatewayClient
from agentcore_rl_toolkit.gateway.client.fleet import Fleet
from agentcore_rl_toolkit.gateway.client.one import OneGateway

URLS = ["http://one", "http://two", "http://three"]


def fleet(count: int = 3) -> Fleet:
    return Fleet(OneGateway(url, public_url=url, admin_key=None, timeout_s=1.0) for url in URLS[:count])


def opened(these: Fleet, gateway: OneGateway, *names: str) -> None:
    for name in names:
        these.opened(gateway, name)


def test_sessions_go_to_the_gateway_with_the_fewest_open_ones() -> None:
    these = fleet()
    first, second, third = these.all
    opened(these, first, "a0", "a1", "a2", "a3")
    opened(these, second, "b")
    shares = these.spread([f"new-{i}" for i in range(7)], these.all)
    assert {g.url: len(names) for g, names in shares.items()} == {second.url: 3, third.url: 4}
    these.ended(["a0", "a1", "a2"])
    assert [len(g.open) for g in these.all] == [1, 1, 0]


def test_between_equals_the_sessions_id_decides_and_not_the_order_of_the_gateways() -> None:
    these = fleet()
    firsts = {next(iter(these.spread([f"session-{i}"], these.all))).url for i in range(64)}
    assert firsts == set(URLS)
    orders = [these.spread(["session-7"], each) for each in (these.all, these.all[::-1])]
    assert len({next(iter(shares)).url for shares in orders}) == 1


def test_a_session_that_none_is_known_to_have_is_asked_of_all_and_an_open_one_goes_where_it_is() -> None:
    these = fleet(2)
    first, second = these.all
    opened(these, second, "mine", "another")
    assert these.by_owner(["mine", "unknown"]) == {second: ["mine", "unknown"], first: ["unknown"]}
    assert these.spread(["mine"], these.all) == {second: ["mine"]}
    assert these.spread(["mine"], [first]) == {first: ["mine"]}
    these.opened(first, "mine")
    assert (first.open, second.open) == ({"mine"}, {"another"})


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
