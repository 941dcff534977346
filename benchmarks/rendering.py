"""CPU cost of the gateway's pure parts: rendering, reading answers, wire formats, merging turns; and its memory in token mode.

Workload: the built-in policy's tokenizer and template (a vocabulary of 576, so texts have more tokens than a large
model's), one tool, a session of 200 turns of about 500 tokens. CPU time of this process, best of several rounds, so other
load on the machine matters little.

Memory: a gateway process with `--model` over a server with ready-made answers; SESSIONS sessions of TURNS turns of 2,000
new tokens each (half of them sampled), --at-once (32) sessions at a time. Then the gateway's resident memory, and
whether every turn comes back with the prompt of the next one beginning with it.

    python benchmarks/rendering.py [--quick] [--sessions N --turns N --at-once N] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import agentcore_rl_toolkit
from agentcore_rl_toolkit.gateway import GatewayClient, SessionCapture, SessionHandle
from agentcore_rl_toolkit.gateway.capture.record import NO_BASE, Base, CallRecord, ChoiceRecord, pack_ids, pack_logprobs
from agentcore_rl_toolkit.gateway.token_calls.histories import past_calls
from agentcore_rl_toolkit.messages.render import Renderer, replay
from agentcore_rl_toolkit.messages.wire import DIALECTS, Delta, ModelRequest
from agentcore_rl_toolkit.trajectory import Turn, build_trajectory

WEIGHTS = Path(agentcore_rl_toolkit.__file__).parent / "policy" / "weights"
PROPERTIES = {"expression": {"type": "string", "description": "Like 2 + 3"}}
PARAMETERS = {"type": "object", "properties": PROPERTIES, "required": ["expression"]}
TOOLS = [{"type": "function", "function": {"name": "calculator", "parameters": PARAMETERS}}]


def best_us(call: Callable[[], Any], rounds: int, calls: int) -> float:
    """CPU microseconds per call, the best round."""
    found = float("inf")
    for _ in range(rounds):
        start = time.process_time()
        for _ in range(calls):
            call()
        found = min(found, (time.process_time() - start) / calls)
    return found * 1e6


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def session(renderer: Renderer, turns: int) -> tuple[list[float], int]:
    """CPU microseconds of each turn (prompt, its JSON, commit), and the length of the last prompt."""
    conversation = renderer.conversation()
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Use the calculator."}]
    messages.append({"role": "user", "content": "What is 2 + 3?"})
    text = "12 apples and 30 pears " * 25
    completion = renderer.encode(text + "<|im_end|>")
    spent = []
    length = 0
    for number in range(turns):
        fresh = json.loads(json.dumps(messages))  # as they come off the wire: equal, but not the same objects
        answer = {"role": "assistant", "content": f"{number} {text}"}
        start = time.process_time()
        prompt = renderer.render(conversation, fresh, TOOLS)
        length = len(prompt.json) and prompt.length
        conversation.commit(prompt, completion, answer, turn_id=str(number))
        spent.append((time.process_time() - start) * 1e6)
        messages += [answer, {"role": "user", "content": f"{number} " + "and what is 7 * 8? " * 16}]
    return spent, length


def merged(turns: int, tokens: int) -> list[Turn]:
    source = random.Random(0)
    history: list[int] = []
    made = []
    for index in range(turns):
        history = history + [source.randrange(150_000) for _ in range(tokens // 2)]
        completion = [source.randrange(150_000) for _ in range(tokens // 2)]
        made.append(
            Turn(
                turn_id=str(index),
                index=index,
                prompt_ids=history,
                completion_ids=completion,
                logprobs=[-0.5] * len(completion),
                finish_reason="stop",
            )
        )
        history = history + completion
    return made


# ---------------------------------------------------------------- histories on disk

SAMPLED = 1000  # tokens of an answer in the memory check


def recorded(renderer: Renderer, turns: int, tokens: int) -> list[CallRecord]:
    """The records of one session, each turn with as many new tokens, half of them sampled."""
    conversation = renderer.conversation(now=0.0)
    records: list[CallRecord] = []
    messages: list[dict[str, Any]] = []
    ids_before = messages_before = 0
    for number in range(turns):
        messages = [*messages, {"role": "user", "content": f"{number} " * (tokens // 5)}]
        prompt = renderer.render(conversation, messages)
        ids = prompt.token_ids
        completion = renderer.encode("12 apples " * (tokens // 10))[: tokens // 2]
        answer = renderer.parse(completion, opens_reasoning=prompt.opens_reasoning).to_message()
        conversation.commit(prompt, completion, answer, turn_id=f"c{number}")
        logprobs = pack_logprobs([-0.5] * len(completion))
        choice = ChoiceRecord(0, pack_ids(completion), logprobs, "stop", "none", json.dumps(answer).encode())
        records.append(
            CallRecord(
                call_id=f"c{number}",
                index=number,
                status="ok",
                dialect="chat",
                model="m",
                started_s=0.0,
                first_token_s=None,
                finished_s=0.0,
                weight_version_first=None,
                weight_version_last=None,
                prompt_base=Base(f"c{number - 1}", 0, ids_before) if number else NO_BASE,
                prompt_ids=pack_ids(ids[ids_before:]),
                messages_base=Base(f"c{number - 1}", -1, messages_before) if number else NO_BASE,
                messages=json.dumps(messages[messages_before:]).encode(),
                choices=[choice],
                request=b"" if number else b"{}",
                request_of="c0" if number else None,
                parent_turn=prompt.parent_turn,
            )
        )
        ids_before, messages_before = len(ids) + len(completion), len(messages)
        messages = [*messages, answer]
    return records


class Answers(asyncio.Protocol):
    """A server that answers every generate call with the same tokens."""

    ready = b""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.wanted = 0
        self.head = b""

    def data_received(self, data: bytes) -> None:
        if not self.wanted:
            self.head += data
            at = self.head.find(b"\r\n\r\n")
            if at < 0:
                return
            length = self.head[: at + 2].lower().split(b"content-length: ")[1].split(b"\r\n")[0]
            data, self.head, self.wanted = self.head[at + 4 :], b"", int(length)
        self.wanted -= len(data)
        if not self.wanted:
            self.transport.write(self.ready)


def ready_answer(renderer: Renderer) -> bytes:
    ids = [*renderer.encode("12 apples and 30 pears " * SAMPLED)[: SAMPLED - 1], min(renderer.stop_token_ids)]
    entries = [{"token": "t", "logprob": -0.5, "bytes": None, "top_logprobs": []}] * len(ids)
    choice = {"index": 0, "token_ids": ids, "logprobs": {"content": entries}, "finish_reason": "stop"}
    body = json.dumps({"request_id": "r", "choices": [choice]}, separators=(",", ":")).encode()
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


async def play(session: SessionHandle, turns: int, question: str) -> None:
    """One session from its first to its last turn, on one connection."""
    host, port = session.base_url.split("/")[2].split(":")
    path = "/" + session.base_url.split("/", 3)[3] + "/chat/completions"
    reader, writer = await asyncio.open_connection(host, int(port), limit=2**22)
    messages = b""
    try:
        for number in range(turns):
            messages += b'{"role":"user","content":"%d %b"}' % (number, question.encode())
            body = b'{"model":"m","messages":[%b]}' % messages
            head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {session.api_key}\r\n"
            writer.write(head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body)
            answer = await reader.readuntil(b"\r\n\r\n")
            length = int(answer.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            reply = json.loads(await reader.readexactly(length))
            answer = {"role": "assistant", "content": reply["choices"][0]["message"]["content"]}
            messages += b"," + json.dumps(answer, separators=(",", ":")).encode() + b","
    finally:
        writer.close()


def whole(capture: SessionCapture, turns: int) -> bool:
    """Every turn is there, and each prompt begins with the one before it and what was sampled."""
    return len(capture.turns) == turns and all(
        after.prompt_ids[: len(before.prompt_ids) + SAMPLED] == [*before.prompt_ids, *before.completion_ids]
        for before, after in itertools.pairwise(capture.turns)
    )


SERVE = """
import asyncio, json, pathlib, sys
from agentcore_rl_toolkit.gateway import GatewayConfig, Limits, UpstreamConfig, serve
settings, budget_mb, url, ready, parent = sys.argv[1:]
limits = Limits(history_bytes=int(budget_mb) * 2**20)
config = GatewayConfig(upstreams=(UpstreamConfig(url=url, engine="vllm"),), limits=limits, **json.loads(settings))
asyncio.run(serve(config, ready_file=pathlib.Path(ready), parent_pid=int(parent)))
"""


async def memory(renderer: Renderer, sessions: int, turns: int, budget_mb: int, at_once: int) -> dict[str, float]:
    """Resident memory of a gateway that tokenises, after many long sessions."""
    Answers.ready = ready_answer(renderer)
    question = "and what is 7 * 8? " * 400
    question = renderer.decode(renderer.encode(question)[: 2000 - SAMPLED - 10])
    server = await asyncio.get_running_loop().create_server(Answers, "127.0.0.1", 0)
    with tempfile.TemporaryDirectory() as folder:
        ready = Path(folder, "ready.json")
        upstream = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        settings = {"model_dir": str(WEIGHTS), "store_dir": f"{folder}/store"}
        run = [json.dumps(settings), str(budget_mb), upstream, str(ready), str(os.getpid())]
        process = await asyncio.to_thread(subprocess.Popen, [sys.executable, "-c", SERVE, *run])
        try:
            client = GatewayClient(await asyncio.to_thread(url_from, ready, process), timeout_s=300)
            handles = await client.create_sessions_async([f"session-{i:05}" + "x" * 30 for i in range(sessions)])
            empty = resident_mb(process.pid)
            gate = asyncio.Semaphore(at_once)

            async def one(handle: SessionHandle) -> None:
                async with gate:
                    await play(handle, turns, question)

            started = cpu_s(process.pid)
            await asyncio.gather(*map(one, handles))
            spent, used = cpu_s(process.pid) - started, resident_mb(process.pid)
            answer = await client.stats_async()
            found = 0
            for i in range(0, sessions, 20):
                names = [h.session_id for h in handles[i : i + 20]]
                captures = await client.fetch_async(names, close=False)
                found += sum(whole(c, turns) for c in captures.values())
                await asyncio.sleep(0)
        finally:
            process.terminate()
            await asyncio.to_thread(process.wait)
            server.close()
    return {
        "sessions": sessions,
        "turns": answer["turns"],
        "whole": found,
        "empty_mb": empty,
        "rss_mb": used,
        "history_mb": answer["history_bytes"] / 2**20,
        "reloads": answer["history_reloads"],
        "store_mb": answer["store_bytes"] / 2**20,
        "cpu_ms_per_call": spent * 1e3 / (sessions * turns),
    }


def url_from(ready: Path, process: subprocess.Popen[bytes]) -> str:
    while not ready.exists():
        if process.poll() is not None:
            raise SystemExit("the gateway did not start")
        time.sleep(0.05)
    return str(json.loads(ready.read_text())["url"])


def resident_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# ---------------------------------------------------------------- all of it


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, fewer sessions")
    parser.add_argument("--sessions", type=int, default=None, help="of the memory check (default 2500, quick 60)")
    parser.add_argument("--turns", type=int, default=None, help="of each of them (default 40, quick 10)")
    parser.add_argument(
        "--at-once", type=int, default=32, help="of them; many times the budget makes every call reload"
    )
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="write rows and checks there")
    asked = parser.parse_args()
    rounds = 3 if asked.quick else 15
    rows: list[tuple[str, str]] = []
    checks: list[dict[str, Any]] = []

    def check(name: str, value: float, target: float, *, least: bool = False) -> None:
        ok = value >= target if least else value <= target
        checks.append({"name": name, "value": round(value, 3), "target": target, "ok": ok})

    start = time.process_time()
    renderer = Renderer.from_path(WEIGHTS)
    rows.append(("load tokenizer and template, probe the template", f"{(time.process_time() - start) * 1e3:.0f} ms"))
    spent, length = session(renderer, 200)
    for name, some in (("2 to 6", spent[1:6]), ("10 to 20", spent[9:20]), ("181 to 200", spent[180:])):
        rows.append((f"prompt of turn {name} (context at the end: {length:,} tokens)", f"{median(some):.0f} us"))
    # The best ones: other load on the machine empties caches, which a late turn feels more.
    check("late turn against early turn, ratio of the best", min(spent[180:]) / min(spent[9:20]), 4.0)
    call = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "12 * 7"}}\n</tool_call><|im_end|>'
    ids = renderer.encode("Let me work that out with care, step by step.\n" + call)
    parse = best_us(lambda: renderer.parse(ids, tools=TOOLS), rounds, 100)
    rows.append((f"read an answer of {len(ids)} tokens with a call", f"{parse:.0f} us"))

    def streamed() -> None:
        stream = renderer.stream(tools=TOOLS)
        for token in ids:
            stream.feed([token])
        stream.feed([], final=True)

    rows.append(("read it token by token, per token", f"{best_us(streamed, rounds, 20) / len(ids):.1f} us"))
    for name in ("chat", "responses", "anthropic"):
        encoder = DIALECTS[name].encoder(ModelRequest(dialect=name, model="m", stream=True), reply_id="x")
        encoder.start()
        rows.append(
            (
                f"write one streamed piece of text, {name}",
                f"{best_us(lambda e=encoder: e.feed(Delta(text='word ')), rounds, 1000):.1f} us",
            )
        )  # type: ignore[misc]
    for turns, tokens in ((20, 500), (1000, 40)):
        made = merged(turns, tokens)
        cost = best_us(lambda m=made: build_trajectory("s", m), rounds, 1)  # type: ignore[misc]
        rows.append((f"merge {turns} turns of {tokens} new tokens", f"{cost / 1e3:.1f} ms"))
    for turns, tokens in ((40, 2000), (200, 500)):
        records = recorded(renderer, turns, tokens)
        cost = best_us(lambda r=records: replay(renderer, past_calls(r)), rounds, 1) / 1e3  # type: ignore[misc]
        rows.append((f"history of {turns} turns of {tokens} tokens made again from its records", f"{cost:.1f} ms"))
        check(f"ms to bring a history of {turns} turns of {tokens} tokens back", cost, 40.0)
    sessions = asked.sessions or (60 if asked.quick else 2500)
    turns = asked.turns or (10 if asked.quick else 40)
    found = asyncio.run(memory(renderer, sessions, turns, 4 if asked.quick else 128, asked.at_once))
    rows += [(f"memory check: {name}", f"{value:,.2f}") for name, value in found.items()]
    check("gateway RSS in MB after the sessions of the memory check", found["rss_mb"], 400.0)
    check("of its sessions come back whole and exact, share", found["whole"] / sessions, 1.0, least=True)
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:<{width}}  {value:>10}")
    for each in checks:
        print(f"{'ok  ' if each['ok'] else 'MISS'} {each['name']}: {each['value']} (target {each['target']})")
    if asked.json is not None:
        asked.json.write_text(json.dumps({"rows": rows, "checks": checks}, indent=1))


if __name__ == "__main__":
    main()
