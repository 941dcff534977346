"""A call that has ended is freed at once, without the garbage collector: it holds a reply that may be large."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from scripted_engine import Fault, ScriptedEngine

from ..asking import MODEL, Start, ask, opened, until

PARTS = {"Call", "Recorder", "RelayedChat", "TokenSampling", "ReplyReader", "TokenReply"}


def parts() -> set[int]:
    """The parts of calls that are alive in this process."""
    return {
        id(each) for each in gc.get_objects() if type(each).__name__ in PARTS and "gateway" in type(each).__module__
    }


@pytest.mark.parametrize("mode", [{}, {"model_dir": str(MODEL)}], ids=["relayed", "rendered"])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_ended_call_is_freed(
    engine: ScriptedEngine, start_gateway: Start, mode: dict[str, Any], stream: bool
) -> None:
    engine.first_id, engine.last_id = 300, 500
    gateway = await start_gateway(engine, **mode)
    session = await opened(gateway)
    gc.collect()
    others = parts()  # of other tests
    gc.disable()
    try:
        for status in (200, 500):
            engine.faults.append(Fault(status=status))
            assert (await ask(session, f"question {status}", stream=stream))[0] == status
        await until(lambda: not gateway.running.calls)
        await until(lambda: not parts() - others, within_s=5.0)  # a rendering thread may just have ended its work
    finally:
        gc.enable()
