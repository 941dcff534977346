"""Sessions at gateways that are slow, restart, or stay away."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from agentcore_rl_toolkit.backends import CollectConfig
from agentcore_rl_toolkit.backends.collection import sessions as module
from agentcore_rl_toolkit.backends.collection.sessions import Sessions
from agentcore_rl_toolkit.errors import GatewayError, GatewayLostError


class Gateway:
    """Raises ``errors`` one by one, and then returns what it is asked for. With ``broken``, no reply has session z."""

    broken: Exception | None = None

    def __init__(self, *errors: Exception, urls: Sequence[str] = ("a", "b")) -> None:
        self.urls, self.errors, self.silent = tuple(urls), list(errors), dict[str, float]()
        self.checks = 0
        self.fetched: list[list[str]] = []
        self.deleted: list[list[str]] = []

    async def away_async(self) -> None:
        self.checks += 1
        self._fail()

    async def create_sessions_async(self, session_ids: list[str], **_: Any) -> list[Any]:
        self._fail()
        return [SimpleNamespace(session_id=name) for name in session_ids if name != "unmade"]

    async def fetch_async(self, session_ids: list[str], *, close: bool) -> dict[str, str]:
        self.fetched.append(sorted(session_ids))
        self._fail()
        if self.broken is not None and "z" in session_ids:
            raise self.broken
        return {name: name.upper() for name in session_ids if name != "unknown"}

    async def delete_async(self, session_ids: list[str]) -> None:
        self.deleted.append(session_ids)
        self._fail()

    def _fail(self) -> None:
        if self.errors:
            raise self.errors.pop(0)


def sessions(gateway: Gateway, patience_s: float = 30.0) -> Sessions:
    return Sessions(gateway, CollectConfig(gateway_patience_s=patience_s))  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_PAUSE_S", 0.001)


async def test_calls_with_seeds_of_their_own_are_not_kept() -> None:
    found = sessions(Gateway())
    for seed in range(9):
        await found.make(str(seed), {"seed": seed})
    assert len(found._makes) <= 2


async def test_gateways_are_checked_at_most_once_in_two_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now))
    gateway = Gateway(GatewayError("gone"))
    found = sessions(gateway)
    for now, checks in ((1000.0, 1), (1001.9, 1), (1002.0, 2), (1003.0, 2)):  # noqa: B007  read by the clock
        await found.look()
        assert gateway.checks == checks


async def test_a_gateway_is_lost_when_its_silence_reaches_the_patience() -> None:
    gateway = Gateway()
    found = sessions(gateway)
    gateway.silent = {"a": 30.0, "b": 29.9}
    assert found.lost == {"a"}
    lost, kept = await asyncio.gather(found.take("x", "a"), found.take("y", "b"))
    assert (lost[0], type(lost[1]), kept, gateway.fetched) == (None, GatewayLostError, ("Y", None), [["y"]])
    alone = sessions(Gateway(urls=("a",)))
    alone._gateway.silent = {"a": 99.0}  # type: ignore[misc]
    assert (alone.urls, alone.lost) == ((), set())


@pytest.mark.parametrize("status", [None, 429, 502, 503, 504])
async def test_a_restarting_gateway_is_asked_again(status: int | None, caplog: pytest.LogCaptureFixture) -> None:
    error = GatewayError("restarts", status=status)
    gateway = Gateway(error, OSError("reset"))
    assert await sessions(gateway).take("x", None) == ("X", None)
    assert len(gateway.fetched) == 3
    assert caplog.text.count("asking again for 30 s") == 1
    impatient = Gateway(error, error)
    assert await sessions(impatient, 0.0).take("x", None) == (None, error)
    assert len(impatient.fetched) == 1


@pytest.mark.parametrize("error", [GatewayError("broken", status=500), ValueError("no JSON")])
async def test_a_session_that_cannot_be_read_costs_its_own_rollout_only(error: Exception) -> None:
    gateway = Gateway()
    gateway.broken = error
    found = sessions(gateway)
    replies = await asyncio.gather(*(found.take(name, None) for name in "xyz"))
    assert replies == [("X", None), ("Y", None), (None, error)]
    assert gateway.fetched[0] == ["x", "y", "z"]
    assert [len(names) for names in gateway.fetched[1:3]] == [1, 2]
    found.end("xyz")
    assert list(found._ended) == ["x", "y"], "its calls are not deleted"
    assert await found.take("unknown", None) == (None, None)


async def test_a_refused_key_is_not_tried_for_each_session() -> None:
    gateway = Gateway(error := GatewayError("refused", status=401))
    found = sessions(gateway)
    assert await asyncio.gather(found.take("x", None), found.take("y", None)) == [(None, error)] * 2
    assert gateway.fetched == [["x", "y"]]


async def test_a_session_that_was_not_made_is_an_error() -> None:
    found = sessions(Gateway())
    assert (await found.make("x", None)).session_id == "x"
    with pytest.raises(GatewayError, match="did not make this session"):
        await found.make("unmade", None)


async def test_ended_sessions_are_deleted_when_they_fill_a_call_and_with_the_last_collection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "SESSIONS_PER_CALL", 2)
    gateway, config = Gateway(), CollectConfig()
    async with Sessions.of(gateway, config) as first:  # type: ignore[arg-type]
        for ended in (["a"], ["b"], ["c"]):
            async with Sessions.of(gateway, config) as second:  # type: ignore[arg-type]
                assert second is first
                second.end(ended)
        assert gateway.deleted == [["a", "b"]]
    assert gateway.deleted == [["a", "b"], ["c"]]
    async with Sessions.of(gateway, config) as later:  # type: ignore[arg-type]
        assert later is not first
