"""Spans, when the agent's process exports any."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from agentcore_rl_toolkit.contract import span_id_of, trace_id_of

SCRIPT = """
import asyncio, json, types, uuid
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

exporter = InMemorySpanExporter()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
trace.set_tracer_provider(provider)

from agentcore_rl_toolkit.app import AgentCoreRLApp
app = AgentCoreRLApp()

class Broken(Exception):
    def __str__(self):
        raise KeyError

def run(payload):
    with trace.get_tracer("agent").start_as_current_span("tool"):
        pass
    if payload.get("fail"):
        raise Broken
    return {"rewards": 1.0}

async def run_async(payload):
    await asyncio.sleep(0)
    return run(payload)

async def main():
    for func in (run, run_async):
        app.rollout_entrypoint(func)
        for fail in (False, True):
            block = {"exp_id": "e", "input_id": "i", "s3_bucket": "memory://" + str(uuid.uuid4())}
            await app.handlers["main"]({"fail": fail, "_rollout": block}, types.SimpleNamespace(session_id="s" * 40))
            for rollout in list(app._engine._live):
                await asyncio.wrap_future(rollout.done)

asyncio.run(main())
print(json.dumps([
    {"name": s.name, "trace": s.context.trace_id, "id": s.context.span_id, "parent": s.parent and s.parent.span_id,
     "attributes": dict(s.attributes), "status": s.status.status_code.name}
    for s in exporter.get_finished_spans()
]))
"""


pytest.importorskip("opentelemetry.sdk.trace")


def test_each_rollout_is_a_span_above_the_agents_own() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", SCRIPT], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    spans = json.loads(done.stdout)
    assert [s["name"] for s in spans] == ["tool", "rollout"] * 4
    for tool, rollout in zip(spans[::2], spans[1::2], strict=True):
        assert tool["parent"] == rollout["id"]
        # In the trace that the trainer's side finds by the session's id, below its root.
        assert tool["trace"] == rollout["trace"] == int(trace_id_of("s" * 40), 16)
        assert rollout["parent"] == int(span_id_of("s" * 40), 16)
        assert rollout["attributes"] | {"agentcore_rl.outcome": ""} == {
            "session.id": "s" * 40,
            "agentcore_rl.input_id": "i",
            "agentcore_rl.exp_id": "e",
            "agentcore_rl.outcome": "",
        }
    assert [s["attributes"]["agentcore_rl.outcome"] for s in spans[1::2]] == ["ok", "agent_error"] * 2
    assert [s["status"] for s in spans[1::2]] == ["UNSET", "ERROR"] * 2
