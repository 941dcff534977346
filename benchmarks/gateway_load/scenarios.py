"""Measurements that no load generator makes: late turns, prompts rendered in the gateway, memory after many turns."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from agentcore_rl_toolkit.gateway import GatewayClient

from .gateways import Target, gateway
from .processes import BENCHMARKS, LOAD_CORE, Server, cpu_s, on_core, peak_kb, process, rss_kb
from .replies import VARIANTS, prompt_ids, sampled_ids
from .table import median
from .wrk import load

AFTER_S = 0.003  # what a gateway does after the last byte of a reply belongs to the call


class Agent:
    """A keep-alive connection without a client library."""

    def __init__(self, target: Target) -> None:
        parts = urllib.parse.urlsplit(target.url)
        self.connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)
        self.pid = target.pid or 0

    def ask(self, row: tuple[str, str], body: bytes) -> bytes:
        path, key = row
        headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        self.connection.request("POST", path, body, headers)
        answer = self.connection.getresponse()
        data = answer.read()
        if answer.status != 200:
            raise SystemExit(f"{answer.status}: {data[:300]!r}")
        return data

    def cost_ms(self, row: tuple[str, str], body: bytes) -> float:
        """CPU of the gateway for one call."""
        before = cpu_s(self.pid)
        self.ask(row, body)
        time.sleep(AFTER_S)
        return (cpu_s(self.pid) - before) * 1000


def _body(messages: list[dict[str, str]], tokens: int, model: str = "m", *, stream: bool = False) -> bytes:
    request = {"model": model, "messages": messages, "max_tokens": tokens} | ({"stream": True} if stream else {})
    return json.dumps(request, separators=(",", ":")).encode()


# Where a dialect is asked, and how its request is written.
DIALECTS: dict[str, tuple[str, Callable[..., bytes]]] = {
    "chat": ("chat/completions", _body),
    "Anthropic": ("messages", _body),
    "Responses": ("responses", lambda *a, **k: _renamed(_body(*a, **k))),
}


def _renamed(body: bytes) -> bytes:
    """A chat request in the words of Responses."""
    return body.replace(b'"messages":', b'"input":', 1).replace(b'"max_tokens":', b'"max_output_tokens":')


def history(
    server: Server, turns: int, tokens: int, *, stream: bool = False, dialect: str = "chat"
) -> dict[str, float]:
    """CPU of the gateway for a late turn against an early one, in a session that grows evenly to `tokens` of context."""
    step = tokens // turns
    early: list[float] = []
    late: list[float] = []
    with gateway("ours", server) as target:
        agent = Agent(target)
        route, write = DIALECTS[dialect]
        rows = [(path.replace("chat/completions", route), key) for path, key in target.rows()]
        for number, length in enumerate([8, 8, 8, turns, turns]):
            messages: list[dict[str, str]] = []
            for turn in range(1, length + 1):
                messages.append({"role": "user", "content": "word " * (step - 64)})
                spent = agent.cost_ms(rows[number], write(messages, 64, f"history-{turn * step}", stream=stream))
                messages.append({"role": "assistant", "content": "".join(f" word{i}" for i in range(64))})
                if 2 <= turn <= 8:
                    early.append(spent)
                elif turn > turns - 7:
                    late.append(spent)
    return {"turn_2_cpu_ms": median(early), f"turn_{turns}_cpu_ms": median(late), "ratio": median(late) / median(early)}


def rendering(server: Server, turns: int, tokens: int) -> dict[str, float]:
    """As `history`, when the gateway renders (built-in policy's template)."""
    spent = []
    line = 15  # tokens, about
    with gateway("ours+tok", server) as target:
        agent, row = Agent(target), target.rows()[0]
        messages: list[dict[str, str]] = [{"role": "system", "content": "Solve the problem. Use the calculator."}]
        for turn in range(turns):
            messages.append(
                {"role": "user", "content": f"What is {turn} + {turn * 7}? " * ((tokens // turns - 64) // line)}
            )
            before = cpu_s(agent.pid)
            answer = json.loads(agent.ask(row, _body(messages, 64)))
            time.sleep(AFTER_S)
            spent.append((cpu_s(agent.pid) - before) * 1000)
            messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
    early, late, length = median(spent[1:8]), median(spent[-7:]), answer["usage"]["prompt_tokens"]
    return {"turn_2_cpu_ms": early, f"turn_{turns}_cpu_ms": late, "ratio": late / early, "prompt_tokens": length}


def read_slowly(target: Target, row: tuple[str, str], tokens: int) -> None:
    """Read a stream with a pause after every piece."""
    place = urllib.parse.urlsplit(target.url)
    path, key = row
    body = _body([{"role": "user", "content": "hi"}], tokens, stream=True)
    with socket.create_connection((place.hostname or "", place.port)) as sock:
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\ncontent-length: {len(body)}"
        sock.sendall(head.encode() + b"\r\n\r\n" + body)
        got = b""
        while b"\r\n0\r\n\r\n" not in got[-64:]:
            data = sock.recv(2**16)
            if not data:
                raise SystemExit("the stream broke off")
            got = got[-64:] + data
            time.sleep(0.02)


def standstill(server: Server, megabytes: int) -> dict[str, float]:
    """The longest time in which the event loop answers no other request, by a process that asks for its health all the time.

    Meanwhile one session sends prompts of 2 MB, another streams 32k tokens to a slow reader, and a third is fetched.
    """
    size = 2 * 2**20

    def prompt(number: int) -> bytes:
        return _body([{"role": "user", "content": f"{number} ".ljust(8, "x") * (size // 8)}], 64)

    with gateway("ours", server, sessions=8) as target, on_core(LOAD_CORE), ThreadPoolExecutor(4) as threads:
        rows, names = target.rows(), target.names()

        def fill(place: int) -> None:
            agent = Agent(target)
            for number in range(place, megabytes * 2**20 // size, 4):
                agent.ask(rows[0], prompt(number))

        list(threads.map(fill, range(4)))
        done = threading.Event()

        def send_long_prompts() -> None:
            agent, number = Agent(target), 10**6
            while not done.is_set():
                agent.ask(rows[2], prompt(number := number + 1))

        place = urllib.parse.urlsplit(target.url)
        command = [sys.executable, "-m", "gateway_load.probe", str(place.hostname), str(place.port)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "cwd": BENCHMARKS}
        with process(command, core=LOAD_CORE, **pipes) as probe:
            sending = threads.submit(send_long_prompts)
            reading = threads.submit(read_slowly, target, rows[1], 32_768)
            with GatewayClient(target.url, timeout_s=300) as client:
                client.fetch([names[0]], close=False)
            reading.result()
            done.set()
            sending.result()
            waits_ms = sorted(json.loads(probe.communicate()[0]))
        return {"longest_ms": waits_ms[-1], "p99_ms": waits_ms[len(waits_ms) * 99 // 100]}


def growth(server: Server, calls: int, sessions: int, readers: int) -> dict[str, float]:
    """Resident memory after many short calls, deleted sessions and slow readers, against a third of each."""
    with gateway("ours", server, sessions=8) as target, GatewayClient(target.url, timeout_s=120) as client:
        pid = target.pid or 0

        def work(calls: int, sessions: int, readers: int, name: str) -> float:
            while calls > 0:
                calls -= load(
                    target.url, target.sessions, tokens=64, stream=calls % 2 == 0, connections=32, seconds=1.0
                ).requests
            for at in range(0, sessions, 100):
                names = [f"{name}-{k}" for k in range(at, min(at + 100, sessions))]
                opened = client.create_sessions(names)
                path = urllib.parse.urlsplit(opened[0].base_url).path + "/chat/completions"
                Agent(target).ask((path, opened[0].api_key), _body([{"role": "user", "content": "hi"}], 64))
                client.delete(names)
            with ThreadPoolExecutor(min(readers, 50)) as threads:
                list(threads.map(lambda k: read_slowly(target, target.rows()[k % 8], 1024), range(readers)))
            time.sleep(1.0)
            return rss_kb(pid) / 1024

        before = work(calls // 3, sessions // 3, readers // 3, "warm")
        after = work(calls, sessions, readers, "more")
        return {"before_mb": before, "after_mb": after, "growth_mb": after - before}


def memory(server: Server, sessions: int, turns: int) -> dict[str, float]:
    """Measure resident memory after long sessions of 1,024 + 1,024 tokens per turn, and check that every turn comes back."""
    with gateway("ours", server, sessions=sessions) as target:
        pid = target.pid or 0
        done, seconds = 0, 5.0
        while done < sessions * turns:
            seen = load(
                target.url,
                target.sessions,
                tokens=1024,
                stream=False,
                connections=64,
                seconds=seconds,
                model="distinct",
                calls=turns,
                offset=done,
            )
            done += seen.requests
            seconds = min(15.0, (sessions * turns - done) / seen.rps)
        time.sleep(1.0)
        loaded = rss_kb(pid) / 1024
        stats = target.ask("/admin/stats")
        expected = {tuple(sampled_ids(1024, v)): tuple(prompt_ids(v, 1024)) for v in range(VARIANTS)}
        names, found, wrong = target.names(), 0, 0
        with GatewayClient(target.url, timeout_s=120) as client:
            for i in range(0, sessions, 20):
                for capture in client.fetch(names[i : i + 20], close=False).values():
                    found += len(capture.turns)
                    wrong += sum(expected.get(tuple(t.completion_ids)) != tuple(t.prompt_ids) for t in capture.turns)
        return {
            "turns": stats["turns"],
            "found": found,
            "wrong": wrong,
            "rss_mb": loaded,
            "rss_after_fetch_mb": rss_kb(pid) / 1024,
            "peak_mb": peak_kb(pid) / 1024,
            "store_mb": stats["store_bytes"] / 1e6,
        }
