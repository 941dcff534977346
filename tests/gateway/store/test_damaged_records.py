"""Calls that are damaged on disk while the gateway runs: who asks for one again is answered."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from scripted_engine import ScriptedEngine

from ..asking import Start, ask, attempt, captured, opened
from ..stores import spoil


@pytest.mark.parametrize("key", [None, "k"])
async def test_after_a_restart_damage_is_passed_over_and_the_calls_beside_it_are_repeated(
    engine: ScriptedEngine, start_gateway: Start, tmp_path: Path, key: str | None
) -> None:
    gateway = await start_gateway(engine, store_dir=str(tmp_path))
    session = await opened(gateway)
    reply = [await attempt(session, key=key, temperature=n / 4) for n in range(3)]
    await gateway.stop(grace_s=0.2)
    gateway = await start_gateway(engine, store_dir=str(tmp_path))
    session = dataclasses.replace(session, base_url=f"{gateway.url}/{session.base_url.split('/', 3)[3]}")
    spoil(gateway, session.session_id, 1)
    assert await attempt(session, retry=1, key=key, temperature=0.0) == reply[0]
    assert await attempt(session, retry=1, key=key, temperature=0.5) == reply[2]
    anew = await attempt(session, retry=1, key=key, temperature=0.25)
    assert anew != reply[1]
    assert await attempt(session, retry=1, key=key, temperature=0.25) == anew
    assert len(engine.calls) == 4
    found = await captured(gateway, session)
    assert [t.completion_ids for t in found.turns][-1] == list(engine.calls[-1].completion_ids[0])
    assert [t.prompt_ids for t in found.turns][-1] == list(engine.calls[-1].prompt_ids)


async def test_a_call_whose_fields_are_stored_with_a_damaged_one_is_no_turn(
    engine: ScriptedEngine, start_gateway: Start
) -> None:
    gateway = await start_gateway(engine)
    session = await opened(gateway)
    for text, temperature in (("w1", 0.5), ("w2", 0.5), ("w3", 0.25)):
        assert (await ask(session, text, temperature=temperature))[0] == 200
    spoil(gateway, session.session_id, 0)
    found = await captured(gateway, session)
    assert [t.sampling for t in found.turns] == [{"temperature": 0.25}]
    assert [e["type"] for e in found.errors] == ["store", "store"]
