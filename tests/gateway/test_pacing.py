"""Streams that rest while there is too much to read lose nothing, and others are not delayed at all."""

from __future__ import annotations

import openai
import pytest

from agentcore_rl_toolkit.gateway import GatewayClient, SessionHandle, pacing
from agentcore_rl_toolkit.gateway.testing import ScriptedEngine


@pytest.mark.parametrize("many", [1, pacing.MANY_PER_S])
async def test_a_stream_arrives_whole_whether_it_rests_or_not(
    engine: ScriptedEngine, client: GatewayClient, session: SessionHandle, many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pacing, "MANY_PER_S", many)
    engine.tokens, engine.token_s = 40, 0.004
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0) as llm:
        for _ in range(2):
            text = ""
            async for chunk in await llm.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "hello"}], stream=True
            ):
                text += chunk.choices[0].delta.content or ""
            assert len(text.split()) == 39
    turns = (await client.fetch_async([session.session_id]))[session.session_id].turns
    assert [t.completion_ids for t in turns] == [r.completion_ids[0] for r in engine.calls]


def settled(streams: int, pieces_per_s: float, *, at: float = 1000.0, pace: pacing.Pace | None = None) -> pacing.Pace:
    """A pace after so many streams were read for a while, each whenever it brings a piece or its rest is over."""
    pace = pace or pacing.Pace()
    now = at
    while now < at + 3.0:
        each_s = max(1 / pieces_per_s, pace.rest_s)
        now += each_s / streams
        pace.read(now)
    return pace


def test_what_there_is_time_for_is_not_delayed() -> None:
    assert settled(1000, 16).rest_s == 0.0
    assert settled(100, 128).rest_s == 0.0


def test_too_many_small_pieces_are_gathered_until_there_is_time_for_them() -> None:
    rest_s = settled(1000, 128).rest_s
    assert 0.7 * pacing.MANY_PER_S <= 1000 / rest_s <= pacing.MANY_PER_S * 1.01
    assert settled(10_000, 128).rest_s == pacing.LONGEST_S


def test_streams_stop_resting_when_there_are_fewer() -> None:
    assert settled(100, 128, at=1010.0, pace=settled(1000, 128)).rest_s == 0.0
