"""Spans, when the agent's process exports any."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agentcore_rl_toolkit.contract import span_id_of, trace_id_of

from .test_entrypoint import SESSION, Bench, Mute

pytest.importorskip("opentelemetry.sdk.trace")

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter


@pytest.mark.parametrize("error", [None, ValueError("why"), Mute()], ids=["none", "text", "no text"])
@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_each_rollout_is_a_span_above_the_agents_own(
    kind: str, error: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)

    def work() -> Any:
        with trace.get_tracer("agent").start_as_current_span("tool"):
            pass
        if error is not None:
            raise error
        return {"rewards": 1.0}

    async def work_async() -> Any:
        await asyncio.sleep(0)
        return work()

    await Bench(work if kind == "sync" else work_async).record()
    tool, rollout = exporter.get_finished_spans()
    assert [tool.name, rollout.name] == ["tool", "rollout"]
    assert tool.parent.span_id == rollout.context.span_id
    # In the trace that the trainer's side finds by the session's id, below its root.
    assert tool.context.trace_id == rollout.context.trace_id == int(trace_id_of(SESSION), 16)
    assert rollout.parent.span_id == int(span_id_of(SESSION), 16)
    ids = {"session.id": SESSION, "agentcore_rl.input_id": "i", "agentcore_rl.exp_id": "e"}
    assert dict(rollout.attributes) == {**ids, "agentcore_rl.outcome": "ok" if error is None else "agent_error"}
    text = "why" if isinstance(error, ValueError) else "Mute"
    status = (rollout.status.status_code.name, rollout.status.description)
    assert status == (("UNSET", None) if error is None else ("ERROR", text))


async def test_a_rollout_whose_process_exports_no_spans_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", None)
    found = await Bench(lambda: {"traced": trace.get_current_span().get_span_context().is_valid}).record()
    assert found["traced"] is False
