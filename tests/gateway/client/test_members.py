"""Which gateway gets a session, and what is remembered of each."""

from __future__ import annotations

import pytest

from agentcore_rl_toolkit.errors import ConfigError
from agentcore_rl_toolkit.gateway import GatewayClient
from agentcore_rl_toolkit.gateway.client.members import FIRST_REST_S, LONGEST_REST_S, Member, Members
from agentcore_rl_toolkit.gateway.client.one import OneGateway

URLS = ["http://one", "http://two", "http://three"]


def members(count: int = 3) -> Members:
    return Members(OneGateway(url, public_url=url, admin_key=None, timeout_s=1.0) for url in URLS[:count])


def opened(these: Members, member: Member, *names: str) -> None:
    for name in names:
        these.opened(member, name)


def test_sessions_go_to_the_gateway_with_the_fewest_open_ones() -> None:
    these = members()
    first, second, third = these.all
    opened(these, first, "a0", "a1", "a2", "a3")
    opened(these, second, "b")
    shares = these.spread([f"new-{i}" for i in range(7)], these.all)
    assert {m.url: len(names) for m, names in shares.items()} == {second.url: 3, third.url: 4}
    these.ended(["a0", "a1", "a2"])
    assert [len(m.open) for m in these.all] == [1, 1, 0]


def test_between_equals_the_sessions_id_decides_and_not_the_order_of_the_gateways() -> None:
    these = members()
    firsts = {next(iter(these.spread([f"session-{i}"], these.all))).url for i in range(64)}
    assert firsts == set(URLS)
    orders = [these.spread(["session-7"], each) for each in (these.all, these.all[::-1])]
    assert len({next(iter(shares)).url for shares in orders}) == 1


def test_a_session_that_nobody_is_known_to_have_is_asked_of_all() -> None:
    these = members(2)
    opened(these, these.all[1], "mine")
    shares = {m.url: names for m, names in these.by_owner(["mine", "unknown"])}
    assert shares == {URLS[1]: ["mine", "unknown"], URLS[0]: ["unknown"]}
    these.deleted(["mine"])
    assert these.owner("mine") is None


def test_an_open_session_goes_where_it_is_while_that_gateway_is_there_and_leaves_a_stray_where_it_is_not() -> None:
    these = members(2)
    first, second = these.all
    opened(these, first, "mine", "another")
    assert these.spread(["mine"], these.all) == {first: ["mine"]}
    assert these.spread(["mine"], [second]) == {second: ["mine"]}
    these.opened(second, "mine")
    assert (first.open, first.strays, second.open) == ({"another"}, {"mine"}, {"mine"})


def test_a_gateway_that_is_away_is_looked_at_less_and_less_often() -> None:
    [member] = members(1).all
    assert member.missed(100.0)
    rests = [member.look_at_s - 100.0]
    for _ in range(7):
        assert not member.missed(100.0)
        rests.append(member.look_at_s - 100.0)
    assert rests[:3] == [FIRST_REST_S, 2 * FIRST_REST_S, 4 * FIRST_REST_S]
    assert rests[-1] == LONGEST_REST_S
    assert member.away_since_s == 100.0
    member.answers()
    assert member.missed(200.0)
    assert member.look_at_s == 200.0 + FIRST_REST_S


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
