"""Print which files of the package one chat completion passes, in the order of their first call.

    python scripts/trace_call.py [--relay] [--stream]

The gateway renders the prompt itself (token mode), or passes the chat on (`--relay`). A scripted server answers. The connections
are open already, and the request continues a conversation. A return is a call into a file that the request has passed before,
from another file. Comprehensions are no calls, and neither is the continuation of a coroutine.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import sys
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import agentcore_rl_toolkit
from agentcore_rl_toolkit._portal import Portal
from agentcore_rl_toolkit.contract import new_session_id
from agentcore_rl_toolkit.gateway import Gateway, GatewayConfig, UpstreamConfig
from agentcore_rl_toolkit.gateway.sessions import SessionSettings

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from scripted_engine import ScriptedEngine

PACKAGE = Path(agentcore_rl_toolkit.__file__).parent
MODEL = PACKAGE / "policy" / "weights"
_PARTS = ("<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>")


class Trace:
    """The calls into the package's files, by `sys.setprofile`."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.returns = 0
        self.on = False
        self._last = ""
        self._begun: set[FrameType] = set()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        path = frame.f_code.co_filename
        if not self.on or event != "call" or not path.startswith(str(PACKAGE)) or frame.f_code.co_name in _PARTS:
            return
        if frame in self._begun:
            return
        self._begun.add(frame)
        name = str(Path(path).relative_to(PACKAGE))
        if name != self._last:
            self.returns += name in self.calls
            self._last = name
        self.calls[name] += 1


def ask(connection: http.client.HTTPConnection, path: str, key: str, messages: list[Any], stream: bool) -> bytes:
    body = {"model": "m", "messages": messages, "max_tokens": 8, "stream": stream}
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    connection.request("POST", path, json.dumps(body), headers)
    return connection.getresponse().read()


async def traced(engine_url: str, *, relay: bool, stream: bool, trace: Trace) -> None:
    upstream = UpstreamConfig(url=engine_url, engine="vllm")
    gateway = Gateway(GatewayConfig(upstreams=(upstream,), model_dir=None if relay else str(MODEL)))
    await gateway.start()
    session = gateway.sessions.create(new_session_id(), SessionSettings())
    path = f"/sessions/{session.id}/v1/chat/completions"
    connection = http.client.HTTPConnection(gateway.url.removeprefix("http://"), timeout=30)
    try:
        messages: list[Any] = [{"role": "user", "content": "hi"}]
        reply = await asyncio.to_thread(ask, connection, path, session.key.decode(), messages, False)
        messages += [json.loads(reply)["choices"][0]["message"], {"role": "user", "content": "bye"}]
        assert gateway._ticker is not None
        gateway._ticker.cancel()  # its work is not that of the request
        await asyncio.sleep(0)
        trace.on = True
        await asyncio.to_thread(ask, connection, path, session.key.decode(), messages, stream)
        trace.on = False
        connection.close()
    finally:
        await gateway.stop(grace_s=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--relay", action="store_true", help="pass the chat on instead of rendering it")
    parser.add_argument("--stream", action="store_true", help="ask for a stream")
    args = parser.parse_args()
    engine, portal = ScriptedEngine(), Portal("scripted-engine", owner="trace_call")
    engine.first_id, engine.last_id = 300, 500
    portal.call(engine.start())
    trace = Trace()
    threading.setprofile(trace)
    sys.setprofile(trace)
    try:
        asyncio.run(traced(engine.url, relay=args.relay, stream=args.stream, trace=trace))
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
        portal.call(engine.stop())
        portal.close()
    for name, count in trace.calls.items():
        print(f"{count:5}  {name}")
    print(f"{len(trace.calls)} files, {trace.returns} returns to an earlier file")


if __name__ == "__main__":
    main()
