"""What each second path pays: the same work with it and without it, side by side.

    python benchmarks/paths.py [--quick] [--json FILE] [--only NAMES]

A second path is code that only makes something faster that works without it. It stays if it saves a quarter of the CPU of
something that users do. A gateway's work is 256 agents of 20 turns each (24 agents with `--quick`): every reply has 1,024
tokens with their ids and logprobs, and every request carries all turns before it. A runtime's work is warm calls to an agent
that does nothing. Inference server and agents are one process beside it. CPU is the server's, from the kernel, for each call.
Runs with a path and without it take turns.
The way to Tinker is the gateway's own; "without" it is Tinker's SDK by itself: sampling, and nothing else that a gateway does.
The sessions of 80 turns end at 98,000 tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from gateway_load import tinker
from gateway_load.gateways import WEIGHTS
from gateway_load.processes import BENCHMARKS, cpu_s, process, settle
from gateway_load.replies import chat_body, chat_stream, dumps, prompt_ids, sampled_ids, whole
from runtime import BODY, HEAD, Caller, session_id

PACKAGE = "agentcore_rl_toolkit"
TURNS, LONG_TURNS, TOKENS, NEW_TOKENS = 20, 80, 1024, 200
TARGET_PERCENT = 25.0
RUN = f"from {PACKAGE}.cli.main import main; main()"
# How a server is started without a path. A module that is None cannot be imported.
WITHOUT = {
    "": "",
    "capture/_scan.c": f"import sys; sys.modules['{PACKAGE}.gateway.capture._scan'] = None",
    "http/_room.c": f"import sys; sys.modules['{PACKAGE}.gateway.http._room'] = None",
    "calls/incremental": f"from {PACKAGE}.gateway.calls import incremental; incremental._continued = lambda *_: None",
    "runtime/http/fast_path": (
        f"from {PACKAGE}.runtime.http import fast_path; fast_path.DirectInvocations.target = lambda *_: None"
    ),
}


@dataclass(frozen=True)
class Row:
    """CPU ms of the server for each call, with the path and without it."""

    path: str
    work: str
    with_ms: float
    without_ms: float

    @property
    def saved_percent(self) -> float:
        return 100 * (1 - self.with_ms / self.without_ms)

    def __str__(self) -> str:
        return (
            f"{self.path:<24} {self.work:<34} {self.with_ms:>8.3f} {self.without_ms:>8.3f} {self.saved_percent:>7.0f} %"
        )


@dataclass(frozen=True)
class Work:
    """What a gateway is asked: one turn's request and its reply, by number of the turn."""

    name: str
    route: str
    requests: list[bytes]
    replies: list[bytes]


def work(name: str, *, stream: bool = False, dialect: str = "chat", turns: int = TURNS) -> Work:
    """Turns of one session. All sessions say the same: a gateway does not look across sessions."""
    route = {"chat": "chat/completions", "Anthropic": "messages"}[dialect]
    messages: list[dict[str, str]] = []
    requests, replies = [], []
    prompt = prompt_ids(0, NEW_TOKENS)
    answer = " ".join(f"word{i % 1000}" for i in range(TOKENS))
    for turn in range(turns):
        messages.append({"role": "user", "content": f"turn {turn}: " + "please " * NEW_TOKENS})
        asked: dict[str, Any] = {"model": "m", "messages": messages, "max_tokens": TOKENS}
        requests.append(dumps(asked | ({"stream": True} if stream else {})))
        replies.append(_reply(prompt, stream=stream))
        messages.append({"role": "assistant", "content": answer})
        prompt = prompt + sampled_ids(TOKENS) + prompt_ids(turn + 1, NEW_TOKENS)
    return Work(name, route, requests, replies)


def _reply(prompt: list[int], *, stream: bool) -> bytes:
    old, new = dumps(prompt_ids()), dumps(prompt)
    if not stream:
        return whole(chat_body(TOKENS).replace(old, new))
    ready = chat_stream(TOKENS)
    first = ready.chunks[0].split(b"\r\n")[1].replace(old, new)
    return b"%b%x\r\n%b\r\n" % (ready.head, len(first), first) + b"".join(ready.chunks[1:])


async def read_message(reader: asyncio.StreamReader) -> bytes:
    """The head of one HTTP message; its body is read and left."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    if b"transfer-encoding: chunked" in head:
        await reader.readuntil(b"\r\n0\r\n\r\n")
    else:
        await reader.readexactly(int(head.partition(b"content-length:")[2].split(b"\r\n", 1)[0] or 0))
    return head


async def run_agents(url: str, rows: list[tuple[str, str]], load: Work) -> None:
    """One agent per session, all at the same time; each asks its next turn when it has the last one's reply."""
    parts = urlsplit(url)

    async def agent(path: str, key: str) -> None:
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=2**24)
        for body in load.requests:
            head = f"POST {path}/{load.route} HTTP/1.1\r\nhost: {parts.netloc}\r\nauthorization: Bearer {key}\r\n"
            head += "content-type: application/json\r\nx-stainless-retry-count: 0\r\n"
            writer.write(head.encode() + b"content-length: %d\r\n\r\n%b" % (len(body), body))
            answer = await read_message(reader)
            if b" 200 " not in answer.split(b"\r\n", 1)[0]:
                raise SystemExit(f"the gateway answered {answer.decode()}")
        writer.close()

    await asyncio.gather(*(agent(path, key) for path, key in rows))


class Inference:
    """An inference server whose replies are ready. Which turn is asked shows in the number of user messages."""

    def __init__(self) -> None:
        self.load: Work | None = None

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n", 1)[0] or 0)
                body = await reader.readexactly(length)
                if self.load is None or head.startswith(b"GET"):
                    writer.write(whole(b"{}"))
                    continue
                writer.write(self.load.replies[body.count(b"turn ") - 1])
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()


@contextmanager
def served(without: str, *options: str, env: dict[str, str] | None = None) -> Iterator[tuple[Any, int]]:
    """A server of the command line, and its pid."""
    with tempfile.TemporaryDirectory() as folder:
        ready, quiet = Path(folder) / "ready.json", subprocess.DEVNULL
        command = [sys.executable, "-c", f"{WITHOUT[without]}\n{RUN}", *options, "--ready-file", str(ready)]
        with process(command, core=None, cwd=folder, stdout=quiet, stderr=quiet, env=env) as running:
            deadline = time.monotonic() + 120
            while not ready.exists():
                if running.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"{' '.join(options)} did not start")
                time.sleep(0.05)
            yield json.loads(ready.read_text()), running.pid


async def gateway_ms(without: str, load: Work, agents: int) -> float:
    """CPU ms of the gateway for each call."""
    inference = Inference()
    server = await asyncio.start_server(inference.serve, "127.0.0.1", 0, limit=2**24, backlog=4096)
    upstream = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    options = ["gateway", "serve", "--no-admin-key", "--engine", "vllm", "--upstream", upstream, "--store", "store"]
    starting = served(without, *options)
    ready, pid = await asyncio.to_thread(starting.__enter__)
    try:
        rows = await asyncio.to_thread(_sessions, ready["url"], agents)
        inference.load = load
        before = cpu_s(pid)
        await run_agents(ready["url"], rows, load)
        await asyncio.to_thread(settle, pid)
        return 1000 * (cpu_s(pid) - before) / (agents * len(load.requests))
    finally:
        await asyncio.to_thread(starting.__exit__, None, None, None)
        server.close()


def _sessions(url: str, count: int) -> list[tuple[str, str]]:
    ids = [f"paths-session-{i:06d}-{'x' * 24}" for i in range(count)]
    request = urllib.request.Request(
        f"{url}/admin/sessions", json.dumps({"session_ids": ids}).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        opened = json.loads(answer.read())["sessions"]
    return [(f"/sessions/{s['session_id']}/v1", s["api_key"]) for s in opened]


class _Address:
    """What `runtime.Caller` needs of a runtime."""

    def __init__(self, ready: Any) -> None:
        self.address = urlsplit(ready["url"])
        self.path = f"/runtimes/{urllib.request.quote(ready['agents']['simple'], safe='')}"  # type: ignore[attr-defined]


async def warm_call_ms(without: str, calls: int) -> float:
    """CPU ms of the runtime for each call to a session that is there; eight callers."""
    with tempfile.TemporaryDirectory() as folder:
        agent = Path(folder) / "simple.py"
        agent.write_text(HEAD + BODY)
        starting = served(without, "runtime", "serve", "--agent", f"simple={agent}", "--quotas", "unlimited")
        ready, pid = await asyncio.to_thread(starting.__enter__)
        try:
            callers = [await Caller(_Address(ready)).open() for _ in range(8)]  # type: ignore[arg-type]

            async def ask(number: int, count: int) -> None:
                for _ in range(count):
                    await callers[number].post("invocations", session_id(number))

            await asyncio.gather(*(ask(number, 20) for number in range(8)))
            rounds = []
            for _ in range(5):
                before = time.clock_gettime((~pid << 3) | 2)  # of this process alone: the agents are its children
                await asyncio.gather(*(ask(number, calls // 40) for number in range(8)))
                rounds.append(1000 * (time.clock_gettime((~pid << 3) | 2) - before) / (calls // 40 * 8))
            return min(rounds)
        finally:
            await asyncio.to_thread(starting.__exit__, None, None, None)


async def tinker_ms(agents: int) -> tuple[float, float]:
    """CPU ms of a call to the rehearsal of Tinker's service: of a whole gateway, and of Tinker's SDK."""
    module = [sys.executable, "-m", "gateway_load.tinker"]
    with process([*module, "serve"], core=None, cwd=BENCHMARKS, stdout=subprocess.PIPE) as service:
        assert service.stdout is not None
        url = (await asyncio.to_thread(service.stdout.readline)).strip()
        options = ["gateway", "serve", "--no-admin-key", "--engine", "tinker", "--upstream", url]
        options += ["--model", str(WEIGHTS), "--sampler", tinker.BASE_MODEL, "--store", "store"]
        starting = served("", *options, env={**os.environ, "TINKER_API_KEY": "tml-benchmark"})
        ready, pid = await asyncio.to_thread(starting.__enter__)
        try:
            rows = await asyncio.to_thread(_sessions, ready["url"], agents)
            asked = {"model": "m", "max_tokens": TOKENS, "messages": [{"role": "user", "content": "please " * 400}]}
            before = cpu_s(pid)
            await run_agents(ready["url"], rows, Work("", "chat/completions", [dumps(asked)] * TURNS, []))
            await asyncio.to_thread(settle, pid)
            ours = 1000 * (cpu_s(pid) - before) / (agents * TURNS)
        finally:
            await asyncio.to_thread(starting.__exit__, None, None, None)
        command = [*module, "sample", url, str(agents), str(TURNS)]
        with process(command, core=None, cwd=BENCHMARKS, stdout=subprocess.PIPE) as sdk:
            assert sdk.stdout is not None
            return ours, 1000 * float(await asyncio.to_thread(sdk.stdout.readline)) / (agents * TURNS)


async def measure(only: list[str], *, quick: bool) -> list[Row]:
    """A row for each path and kind of work."""
    agents, rounds = (24, 1) if quick else (256, 2)
    chat, streamed = work("replies in one piece"), work("streamed replies", stream=True)
    anthropic = work("Anthropic's dialect", dialect="Anthropic")
    late = work(f"Anthropic's dialect, {LONG_TURNS} turns", dialect="Anthropic", turns=LONG_TURNS)
    plan = {
        "capture/_scan.c": [chat, streamed],
        "http/_room.c": [chat, streamed],
        "calls/incremental": [chat, anthropic, late],
    }
    found: list[Row] = []
    with_path: dict[str, list[float]] = {}
    for path, loads in plan.items():
        if only and not any(word in path for word in only):
            continue
        for load in loads:
            without = []
            for _ in range(rounds):
                count = max(1, agents * TURNS // len(load.requests) // 4) if load is late else agents
                with_path.setdefault(load.name, []).append(await gateway_ms("", load, count))
                without.append(await gateway_ms(path, load, count))
            found.append(Row(path, load.name, min(with_path[load.name]), min(without)))
            print(found[-1], flush=True)
    name = "runtime/http/fast_path"
    if not only or any(word in name for word in only):
        calls = 2_000 if quick else 20_000
        pairs = [(await warm_call_ms("", calls), await warm_call_ms(name, calls)) for _ in range(rounds)]
        found.append(Row(name, "a warm call", min(a for a, _ in pairs), min(b for _, b in pairs)))
        print(found[-1], flush=True)
    name = "gateway/tinker"
    if not only or any(word in name for word in only):
        pairs = [await tinker_ms(agents) for _ in range(rounds)]
        found.append(Row(name, "1,024 tokens at Tinker", min(a for a, _ in pairs), min(b for _, b in pairs)))
        print(found[-1], flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="24 agents, one round")
    parser.add_argument("--json", metavar="FILE", help="write rows and checks there too")
    parser.add_argument("--only", default="", metavar="NAMES", help="paths whose names have one of these words")
    args = parser.parse_args()
    if not sys.platform.startswith("linux"):
        raise SystemExit("this benchmark reads the CPU of processes from Linux's clocks")
    print(f"{'path':<24} {'work':<34} {'with ms':>8} {'without':>8} {'saved':>7}")
    rows = asyncio.run(measure([word for word in args.only.split(",") if word], quick=args.quick))
    best = {path: max(r.saved_percent for r in rows if r.path == path) for path in dict.fromkeys(r.path for r in rows)}
    checks = [
        {"name": f"{path} saves CPU, %", "value": saved, "target": TARGET_PERCENT, "ok": saved >= TARGET_PERCENT}
        for path, saved in best.items()
    ]
    for check in checks:
        print(
            f"{'ok  ' if check['ok'] else 'MISS'} {check['name']}: {check['value']:.0f}, at least {TARGET_PERCENT:.0f}"
        )
    if args.json:
        as_rows = [{**asdict(row), "saved_percent": row.saved_percent} for row in rows]
        Path(args.json).write_text(json.dumps({"rows": as_rows, "checks": checks}, indent=1))


if __name__ == "__main__":
    main()
