"""Streams that rest while many calls run lose nothing, and few calls are not delayed at all."""

from __future__ import annotations

import openai
import pytest

from agentcore_rl_toolkit.gateway import GatewayClient, SessionHandle, pacing
from agentcore_rl_toolkit.gateway.testing import ScriptedEngine


@pytest.mark.parametrize("few", [0, 400])
async def test_a_stream_arrives_whole_whether_it_rests_or_not(
    engine: ScriptedEngine, client: GatewayClient, session: SessionHandle, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pacing, "FEW", few)
    monkeypatch.setattr(pacing, "READS_PER_S", 20)
    engine.tokens, engine.token_s = 20, 0.004
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0) as llm:
        for _ in range(2):
            text = ""
            async for chunk in await llm.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "hello"}], stream=True
            ):
                text += chunk.choices[0].delta.content or ""
            assert len(text.split()) == 19
    turns = (await client.fetch_async([session.session_id]))[session.session_id].turns
    assert [t.completion_ids for t in turns] == [r.completion_ids[0] for r in engine.calls]


def test_the_rest_grows_with_the_calls_that_run() -> None:
    running = [10]
    pacer = pacing.Pacer(lambda: running[0])
    assert pacer.interval_s() == 0.0
    running[0] = 1000
    assert pacer.interval_s() == pytest.approx(0.04)
    running[0] = 10**6
    assert pacer.interval_s() == pacing.LONGEST_S
