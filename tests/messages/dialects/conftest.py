"""A real HTTP server that answers with a scripted reply, translated by the dialects: what the SDKs are tried on."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from agentcore_rl_toolkit.messages.dialects import (
    Choice,
    Delta,
    ModelRequest,
    Reply,
    RequestError,
    ToolCall,
    Usage,
    deltas_of,
)
from agentcore_rl_toolkit.messages.errors import error_body

from ..dialect_paths import dialect_of


class Provider:
    """What the server does: ``reply`` or ``deltas`` or ``error`` is given out, ``requests`` are what came in."""

    def __init__(self) -> None:
        self.reply = Reply(
            id="chatcmpl-1",
            model="small",
            created=1_700_000_000,
            choices=[Choice(content="Hello.", finish_reason="stop")],
            usage=Usage(prompt_tokens=11, completion_tokens=3, cached_tokens=2),
        )
        self.deltas: list[Delta] | None = None
        self.error: RequestError | None = None
        self.error_in_stream: RequestError | None = None
        self.requests: list[ModelRequest] = []
        self.slice = 7  # bytes per write: no event arrives in one piece
        self.url = ""


def _handler(provider: Provider) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            dialect = dialect_of(self.path.partition("?")[0])
            assert dialect is not None, self.path
            body = self.rfile.read(int(self.headers["Content-Length"]))
            try:
                if provider.error is not None:
                    raise provider.error
                request = dialect.parse_request(body)
            except RequestError as error:
                self._answer(error.status or 500, error_body(dialect.name, error))
                return
            provider.requests.append(request)
            if not request.stream:
                self._answer(200, dialect.encode_reply(provider.reply, request))
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            encoder = dialect.encoder(request, reply_id=provider.reply.id, model=provider.reply.model)
            out = encoder.start()
            for delta in provider.deltas if provider.deltas is not None else deltas_of(provider.reply):
                out += encoder.feed(delta)
            out += encoder.error(provider.error_in_stream) if provider.error_in_stream else encoder.finish()
            for at in range(0, len(out), provider.slice):
                piece = out[at : at + provider.slice]
                self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            self.wfile.write(b"0\r\n\r\n")

        def _answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            """Quiet."""

    return Handler


@pytest.fixture
def provider() -> Iterator[Provider]:
    made = Provider()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _handler(made))
    server.daemon_threads = True
    made.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield made
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()


@pytest.fixture
def full_reply() -> Reply:
    """Reasoning, text and two parallel calls."""
    return Reply(
        id="chatcmpl-2",
        model="small",
        created=1_700_000_000,
        choices=[
            Choice(
                content="Let me look.",
                reasoning="They want two things.",
                tool_calls=[
                    ToolCall(id="call_a", name="look_up", arguments='{"query": "naïve \\n x", "limit": 3}'),
                    ToolCall(id="call_b", name="now", arguments="{}"),
                ],
                finish_reason="tool_calls",
                parse_status="parsed",
            )
        ],
        usage=Usage(prompt_tokens=20, completion_tokens=30, cached_tokens=5, reasoning_tokens=6),
    )
