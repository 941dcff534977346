"""A proxy that does the least a Python gateway can: relay, decode the tokens, append them to a file.

`python -m gateway_load.bare UPSTREAM PORT`. No sessions, keys, repetitions, histories, retries, limits, deadlines or errors: what
a call costs here is what the machine and the language take, with the same libraries as the gateway under test.
"""

from __future__ import annotations

import asyncio
import os
import struct
import sys
import tempfile
from typing import Any
from urllib.parse import urlsplit

import httptools
import msgspec
import uvloop


class Logprob(msgspec.Struct, gc=False):
    logprob: float


class Logprobs(msgspec.Struct, gc=False):
    content: list[Logprob] = []


class Choice(msgspec.Struct, gc=False):
    token_ids: list[int] | None = None
    logprobs: Logprobs | None = None


class Reply(msgspec.Struct, gc=False):
    choices: list[Choice] = []
    prompt_token_ids: list[int] | None = None


_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_reply = msgspec.json.Decoder(Reply)
_encode = msgspec.json.Encoder().encode
_TRUE = msgspec.Raw(b"true")
_HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"


class Bare:
    """The proxy: idle connections to the server, and the file."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.host, self.port = parts.hostname or "127.0.0.1", parts.port or 80
        self.idle: list[Upstream] = []
        self.file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115  (as long as the process)

    async def connect(self, agent: Agent, request: bytes) -> None:
        _, server = await asyncio.get_running_loop().create_connection(lambda: Upstream(self), self.host, self.port)
        server.ask(agent, request)

    def keep(self, replies: list[Reply]) -> None:
        """Append the tokens of one call."""
        prompt = next((r.prompt_token_ids for r in replies if r.prompt_token_ids), [])
        ids = [i for r in replies for c in r.choices for i in c.token_ids or ()]
        logprobs = [e.logprob for r in replies for c in r.choices if c.logprobs for e in c.logprobs.content]
        layout = f"<II{len(prompt)}i{len(ids)}i{len(logprobs)}f"
        os.write(self.file.fileno(), struct.pack(layout, len(prompt), len(ids), *prompt, *ids, *logprobs))


class Upstream(asyncio.Protocol):
    """A connection to the server."""

    def __init__(self, bare: Bare) -> None:
        self.bare = bare
        self.transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def ask(self, agent: Agent, request: bytes) -> None:
        self.agent = agent
        self.read: list[bytes] = []
        self.body: list[bytes] = []
        self.parser = httptools.HttpResponseParser(self)
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        agent = self.agent
        if agent.stream:
            agent.transport.write(data)
        else:
            self.read.append(data)
        self.parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        self.body.append(body)

    def on_message_complete(self) -> None:
        agent, body = self.agent, b"".join(self.body)
        if agent.stream:
            events = (e[6:] for e in body.split(b"\n\n") if e.startswith(b"data: {"))
            self.bare.keep([_reply.decode(event) for event in events])
        else:
            self.bare.keep([_reply.decode(body)])
            agent.transport.write(b"".join(self.read))
        self.bare.idle.append(self)


class Agent(asyncio.Protocol):
    """A connection from an agent."""

    def __init__(self, bare: Bare) -> None:
        self.bare = bare
        self.transport: Any = None
        self.stream = False
        self.body: list[bytes] = []
        self.parser = httptools.HttpRequestParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        self.body.append(body)

    def on_message_complete(self) -> None:
        if self.parser.get_method() != b"POST":
            self.transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
            return
        fields = _fields.decode(b"".join(self.body))
        self.body.clear()
        self.stream = "stream" in fields and bytes(fields["stream"]) == b"true"
        fields["logprobs"] = fields["return_token_ids"] = _TRUE
        body = _encode(fields)
        request = _HEAD % len(body) + body
        if self.bare.idle:
            self.bare.idle.pop().ask(self, request)
        else:
            self.opening = asyncio.get_running_loop().create_task(self.bare.connect(self, request))


async def main(url: str, port: int) -> None:
    bare = Bare(url)
    server = await asyncio.get_running_loop().create_server(lambda: Agent(bare), "127.0.0.1", port, backlog=4096)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.install()
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
