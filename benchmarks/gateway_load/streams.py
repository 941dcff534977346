"""Does a gateway really relay a stream, and what does a chunk cost it when nothing can be put together?

The inference server writes one token at a time with pauses between; a client on plain sockets counts what arrives when.
"""

from __future__ import annotations

import selectors
import socket
import time
import urllib.parse
from dataclasses import dataclass

from .gateways import Target, gateway
from .processes import cpu_s, upstream
from .table import median
from .wrk import chat_request

STREAMS, TOKENS = 16, 256
FIRST_S, LAST_S = 0.5, 2.5


@dataclass
class Received:
    """One stream as it came in."""

    sent_s: float
    body: bytes = b""
    reads: int = 0
    first_s: float = 0.0
    last_s: float = 0.0
    complete: bool = False


@dataclass
class Relay:
    """Medians over the streams; CPU of the gateway per token of a stream."""

    gateway: str
    events: float
    reads: float
    first_ms: float
    last_ms: float
    cpu_us: float | None
    relays: bool = False


def receive(target: Target, streams: int, tokens: int, timeout_s: float = 60) -> list[Received]:
    """Open so many streams at once and read them to their end."""
    parts = urllib.parse.urlsplit(target.url)
    body = chat_request(tokens, stream=True).encode()
    waiting = selectors.DefaultSelector()
    found = []
    rows = target.rows()
    for i in range(streams):
        path, key = rows[i % len(rows)]
        sock = socket.create_connection((parts.hostname, parts.port), timeout=timeout_s)
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\ncontent-type: application/json\r\n"
        sock.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        found.append(Received(time.monotonic()))
        waiting.register(sock, selectors.EVENT_READ, found[-1])
    deadline = time.monotonic() + timeout_s
    while waiting.get_map() and time.monotonic() < deadline:
        for key_, _ in waiting.select(1.0):
            sock, stream = key_.fileobj, key_.data
            assert isinstance(sock, socket.socket)
            data = sock.recv(2**18)
            stream.body += data
            if b"data: " in data:
                stream.reads += 1
                stream.last_s = time.monotonic() - stream.sent_s
                stream.first_s = stream.first_s or stream.last_s
            if not data or stream.body.endswith(b"0\r\n\r\n"):
                stream.complete = stream.body.endswith(b"0\r\n\r\n")
                waiting.unregister(sock)
                sock.close()
    for key_ in list(waiting.get_map().values()):
        assert isinstance(key_.fileobj, socket.socket)
        key_.fileobj.close()
    return found


def probe(names: tuple[str, ...]) -> list[Relay]:
    """What of 16 streams of 256 tokens, each token written by itself between 0.5 and 2.5 s, arrives how."""
    rows = []
    with upstream(FIRST_S, LAST_S) as server:
        for name in names:
            with gateway(name, server) as target:
                receive(target, 1, 64)  # its first call makes a gateway import and connect
                before = cpu_s(target.pid) if target.pid else 0.0
                found = receive(target, STREAMS, TOKENS)
                spent = cpu_s(target.pid) - before if target.pid else None
            whole = [s for s in found if s.complete]
            if not whole:
                raise SystemExit(f"{name} finished no stream")
            row = Relay(
                gateway=name,
                events=median([s.body.count(b"data: ") for s in whole]),
                reads=median([s.reads for s in whole]),
                first_ms=median([s.first_s for s in whole]) * 1000,
                last_ms=median([s.last_s for s in whole]) * 1000,
                cpu_us=None if spent is None else spent * 1e6 / STREAMS / TOKENS,
            )
            row.relays = row.reads > TOKENS / 2 and row.first_ms < (FIRST_S + LAST_S) / 2 * 1000
            rows.append(row)
    return rows


def show(rows: list[Relay]) -> None:
    print(
        f"\nstreams relayed: {STREAMS} at once, {TOKENS} tokens, each written by itself, "
        f"the first after {FIRST_S * 1000:.0f} ms, the last after {LAST_S * 1000:.0f} ms"
    )
    print(f"{'gateway':<8} {'events':>7} {'reads':>6} {'first ms':>9} {'last ms':>8} {'CPU us per token':>17}")
    for r in rows:
        cpu = "-" if r.cpu_us is None else f"{r.cpu_us:.1f}"
        note = "" if r.relays else "  does not relay: the answer comes when it is finished"
        print(
            f"{r.gateway:<8} {r.events:>7.0f} {r.reads:>6.0f} {r.first_ms:>9.0f} {r.last_ms:>8.0f} {cpu:>17}{note}",
            flush=True,
        )
