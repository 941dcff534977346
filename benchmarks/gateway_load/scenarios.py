"""What no load generator shows: late turns, prompts tokenised in the gateway, memory after many turns."""

from __future__ import annotations

import http.client
import json
import time
import urllib.parse
from collections.abc import Callable

from agentcore_rl_toolkit.gateway import GatewayClient

from .gateways import Target, gateway
from .processes import Server, cpu_s, peak_kb, rss_kb
from .replies import VARIANTS, prompt_ids, sampled_ids
from .table import median
from .wrk import load

AFTER_S = 0.003  # what a gateway does after the last byte of a reply belongs to the call


class Agent:
    """One keep-alive connection, with nothing in between."""

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
    """As `history`, when the gateway tokenises (built-in policy's template)."""
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


def memory(server: Server, sessions: int, turns: int) -> dict[str, float]:
    """Resident memory after many long sessions of 1,024 + 1,024 tokens a turn, and whether every turn comes back as it was."""
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
