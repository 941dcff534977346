"""Model gateways side by side: requests per second, latency, CPU and memory per call.

    python benchmarks/gateway.py [--quick] [--json FILE] [--only ours,direct] [--seconds 5]

One scripted inference server (vLLM's chat format, ready-made answers of 64 and 1,024 tokens over a 512-token prompt)
and one load generator (wrk) share the first core; the gateway under test has the second to itself. Every gateway
records what it can: sessions, keys, de-duplication and the durable store are on in ours. Peers are installed from the
package index into environments of their own under `.venvs/`. CPU per call is the figure that depends least on what
else the machine does.

Columns: req/s, p50 and p99 in ms, CPU ms of the gateway per request, RSS growth in KB per request, errors.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from agentcore_rl_toolkit.gateway import GatewayClient

ROOT = Path(__file__).resolve().parent.parent
VENVS = ROOT / ".venvs"
PEERS = {"rllm": "rllm-model-gateway==0.1.0", "toolkit": "agentcore-rl-toolkit[gateway]==0.2.0"}
SESSIONS = 2000
CALLS_PER_SESSION = 10


# ---------------------------------------------------------------- the scripted inference server (its own process)


def canned(tokens: int) -> tuple[bytes, bytes]:
    """Whole and streamed answer of so many tokens, as vLLM writes them."""
    prompt = [(i * 7919) % 150_000 for i in range(512)]
    ids = [(i * 104_729 + 11) % 150_000 for i in range(tokens)]
    words = [f" word{i % 1000}" for i in range(tokens)]
    logprobs = [
        {"token": w, "logprob": -((i % 97) + 1) / 64, "bytes": list(w.encode()), "top_logprobs": []}
        for i, w in enumerate(words)
    ]
    top = {"id": "chatcmpl-1", "created": 1_700_000_000, "model": "m"}
    usage = {"prompt_tokens": 512, "total_tokens": 512 + tokens, "completion_tokens": tokens}
    whole = {
        **top,
        "object": "chat.completion",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "".join(words), "tool_calls": []},
                "logprobs": {"content": logprobs},
                "finish_reason": "stop",
                "stop_reason": None,
                "token_ids": ids,
            }
        ],
        "usage": usage,
        "prompt_token_ids": prompt,
    }
    body = json.dumps(whole, separators=(",", ":")).encode()
    plain = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    chunks = [
        {
            **top,
            "object": "chat.completion.chunk",
            "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}],
            "prompt_token_ids": prompt,
        }
    ]
    for i, (token, word, logprob) in enumerate(zip(ids, words, logprobs, strict=True)):
        choice = {
            "index": 0,
            "delta": {"content": word},
            "logprobs": {"content": [logprob]},
            "finish_reason": "stop" if i == tokens - 1 else None,
            "token_ids": [token],
        }
        chunks.append({**top, "object": "chat.completion.chunk", "choices": [choice]})
    parts = [b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"]
    for text in [*(json.dumps(c, separators=(",", ":")) for c in chunks), "[DONE]"]:
        event = b"data: %b\n\n" % text.encode()
        parts.append(b"%x\r\n%b\r\n" % (len(event), event))
    parts.append(b"0\r\n\r\n")
    return plain, b"".join(parts)


def serve_upstream(port: int, think_s: float) -> None:
    """Answer every POST at once with the canned answer;

    with `think_s`, after so long, and streams token by token over the second half of it.
    """
    import asyncio

    import httptools
    import uvloop

    answers = {n: canned(n) for n in (64, 256, 1024)}
    generate = {}
    for n in (64, 256, 1024):
        reply = json.loads(answers[n][0].partition(b"\r\n\r\n")[2])
        reply["choices"][0]["token_ids"] = [
            300 + i % 150 for i in range(n)
        ]  # the built-in policy's tokenizer has these
        body = json.dumps({"choices": reply["choices"]}, separators=(",", ":")).encode()
        generate[n] = (
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body
        )
    size_of = re.compile(rb'"max_tokens": ?(\d+)')
    grown_of = re.compile(rb'"model": ?"history-(\d+)"')
    # A session's prompts extend each other: prompt and completion of the turn before, then new tokens.
    head, tail = answers[64][0].partition(b"\r\n\r\n")[2].split(b'"prompt_token_ids":[')
    sampled = head.partition(b'"token_ids":[')[2].partition(b"]")[0]
    prompts: dict[int, bytes] = {}

    def history(size: int) -> bytes:
        before = max(prompts) if prompts else 0
        new = b",".join(b"%d" % (1000 + i % 50_000) for i in range(before, size))
        prompt = prompts[before] + b"," + sampled + b"," + new if before else new
        prompts.clear()
        prompts[size] = prompt
        body = head + b'"prompt_token_ids":[' + prompt + b"]" + tail.partition(b"]")[2]
        return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body

    class Server(asyncio.Protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            self.transport = transport
            self.parser = httptools.HttpRequestParser(self)
            self.body = b""
            self.url = b""

        def data_received(self, data: bytes) -> None:
            self.parser.feed_data(data)

        def on_message_begin(self) -> None:
            self.body = self.url = b""

        def on_url(self, url: bytes) -> None:
            self.url += url

        def on_body(self, body: bytes) -> None:
            self.body += body

        def on_message_complete(self) -> None:
            if self.parser.get_method() == b"GET":
                self.transport.write(
                    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
                )
                return
            grown = grown_of.search(self.body)
            if grown:
                self.transport.write(history(int(grown[1])))
                return
            found = size_of.search(self.body)
            size = int(found[1]) if found else 64
            if self.url.endswith(b"/generate"):
                answer = generate[size]
            else:
                answer = answers[size][b'"stream":true' in self.body or b'"stream": true' in self.body]
            if not think_s:
                self.transport.write(answer)
            elif b"chunked" in answer[:120]:
                loop.create_task(self.trickle(answer, size))
            else:
                loop.call_later(think_s, self.transport.write, answer)

        async def trickle(self, answer: bytes, size: int) -> None:
            pieces = answer.split(b"\r\n\r\n", 1)
            chunks = [p + b"\n\n\r\n" for p in pieces[1].split(b"\n\n\r\n")]
            chunks[-1] = b"0\r\n\r\n"
            self.transport.write(pieces[0] + b"\r\n\r\n")
            start = loop.time()
            for i, chunk in enumerate(chunks):
                await asyncio.sleep(start + think_s * i / len(chunks) - loop.time())
                if self.transport.is_closing():
                    return
                self.transport.write(chunk)

    async def main() -> None:
        server = await loop.create_server(Server, "127.0.0.1", port, backlog=4096)
        print(server.sockets[0].getsockname()[1], flush=True)
        await server.serve_forever()

    loop = uvloop.new_event_loop()
    asyncio.set_event_loop(loop)
    loop.run_until_complete(main())


TOOLKIT_SERVER = '''
import sys
from aiohttp import web
from agentcore_rl_toolkit.rollout_gateway import RolloutGateway
from agentcore_rl_toolkit.rollout_gateway.render import ParsedOutput
from agentcore_rl_toolkit.rollout_gateway.sampling_backends.vllm_http import VllmHttpBackend

PROMPT = [(i * 7919) % 150_000 for i in range(512)]

class Renderer:
    """Costs nothing, so that what is measured is the gateway."""
    async def render(self, *args, **kwargs): return list(PROMPT)
    def get_stop_sequences(self): return []
    def parse(self, ids, *args, **kwargs): return ParsedOutput(reasoning="", text="word", tool_uses=[])

gateway = RolloutGateway(backend=VllmHttpBackend(sys.argv[1]), renderer=Renderer(), adapters=["openai"])
web.run_app(gateway.app, host="127.0.0.1", port=int(sys.argv[2]), print=None, access_log=None, backlog=4096)
'''

# ---------------------------------------------------------------- the load generator

WRK_SCRIPT = """
local sessions = {}
for line in io.lines("%(sessions)s") do
  local path, key = line:match("^(%%S+) (%%S+)$")
  sessions[#sessions + 1] = wrk.format("POST", path,
    {["host"] = "gateway", ["content-type"] = "application/json", ["authorization"] = "Bearer " .. key}, %(body)s)
end
local n = 0
request = function()
  local s = sessions[math.floor(n / %(calls)d) %% #sessions + 1]
  n = n + 1
  return s
end
done = function(summary, latency, requests)
  local e = summary.errors
  local failed = e.connect + e.read + e.write + e.status + e.timeout
  io.write(string.format('RESULT {"requests":%%d,"us":%%d,"errors":%%d,', summary.requests, summary.duration, failed))
  io.write(string.format('"p50":%%f,"p99":%%f}\\n', latency:percentile(50), latency:percentile(99)))
end
"""


def lua_string(text: str) -> str:
    return "[==[" + text + "]==]"


def load(
    url: str,
    targets: Path,
    *,
    tokens: int,
    stream: bool,
    connections: int,
    seconds: float,
    calls: int = CALLS_PER_SESSION,
) -> dict[str, float]:
    """Run wrk against the sessions listed in `targets`. Times in ms."""
    body = {
        "model": "m",
        "messages": [
            {"role": "system", "content": "You are a careful assistant. " * 20},
            {"role": "user", "content": "Work it out step by step. " * 20},
        ],
        "max_tokens": tokens,
        "temperature": 1.0,
    }
    if stream:
        body["stream"] = True
    text = json.dumps(body, separators=(",", ":"))
    with tempfile.NamedTemporaryFile("w", suffix=".lua") as script:
        script.write(WRK_SCRIPT % {"sessions": targets, "body": lua_string(text), "calls": calls})
        script.flush()
        command = [
            "wrk",
            "-t1",
            f"-c{connections}",
            f"-d{max(1, round(seconds))}s",
            "--timeout",
            "60s",
            "-s",
            script.name,
            url,
        ]
        done = subprocess.run(pinned(0, command), capture_output=True, text=True, timeout=seconds + 120, check=False)
    found = re.search(r"RESULT (\{.*\})", done.stdout)
    if not found:
        raise SystemExit(f"wrk failed: {done.stderr or done.stdout}")
    told = json.loads(found[1])
    return {
        "requests": told["requests"],
        "seconds": told["us"] / 1e6,
        "p50": told["p50"] / 1000,
        "p99": told["p99"] / 1000,
        "errors": told["errors"],
    }


# ---------------------------------------------------------------- processes


def pinned(core: int | None, command: list[str]) -> list[str]:
    """The command on one core: on a machine with two, load and gateway must not fight for the same one."""
    if core is None:
        return command
    if sys.platform == "linux" and shutil.which("taskset") and (os.cpu_count() or 1) > 1:
        return ["taskset", "-c", str(core), *command]
    return command


def children(pid: int) -> list[int]:
    found = [pid]
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            found += children(int(child))
    return found


def usage(pid: int) -> tuple[float, float]:
    """CPU seconds and resident KB of a process and its children."""
    cpu = rss = 0.0
    for each in children(pid):
        fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
        cpu += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        rss += int(fields[21]) * os.sysconf("SC_PAGE_SIZE") / 1024
    return cpu, rss


@contextmanager
def process(command: list[str], *, core: int | None, **options: object) -> Iterator[subprocess.Popen[str]]:
    running = subprocess.Popen(pinned(core, command), text=True, start_new_session=True, **options)  # type: ignore[call-overload]
    try:
        yield running
    finally:
        if running.poll() is None:
            running.send_signal(signal.SIGTERM)
            try:
                running.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(running.pid, signal.SIGKILL)
                running.wait()


def wait_http(url: str, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            urllib.request.urlopen(url, timeout=2).read()
            return
        except urllib.error.HTTPError:
            return
        except OSError:
            if time.monotonic() > deadline:
                raise SystemExit(f"nothing answers at {url}") from None
            time.sleep(0.1)


def free_port() -> int:
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@contextmanager
def upstream(think_s: float = 0.0) -> Iterator[str]:
    command = [sys.executable, __file__, "--serve-upstream", str(think_s)]
    with process(command, core=0, stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        yield f"http://127.0.0.1:{int(running.stdout.readline())}"


def peer_python(name: str) -> str:
    """Interpreter of a peer's own environment, made on first use."""
    home = VENVS / f"bench-{name}"
    python = home / "bin" / "python"
    if not python.exists():
        uv = Path(sys.executable).parent / "uv"
        tool = str(uv) if uv.exists() else "uv"
        subprocess.run(
            [tool, "venv", "-q", "--python", f"{sys.version_info[0]}.{sys.version_info[1]}", str(home)], check=True
        )
        subprocess.run([tool, "pip", "install", "-q", "--python", str(python), PEERS[name]], check=True)
    return str(python)


@dataclass
class Target:
    """A gateway under test: where it is, whose CPU counts, which sessions it is asked for."""

    url: str
    pid: int | None
    sessions: Path


def targets_file(folder: Path, rows: list[tuple[str, str]]) -> Path:
    path = folder / "sessions.txt"
    path.write_text("".join(f"{a} {b}\n" for a, b in rows))
    return path


@contextmanager
def gateway(
    name: str, upstream_url: str, *, workers: int = 1, sessions: int = SESSIONS, options: tuple[str, ...] = ()
) -> Iterator[Target]:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if name == "direct":
            yield Target(upstream_url, None, targets_file(folder, [("/v1/chat/completions", "k")]))
        elif name == "ours":
            ready = folder / "ready.json"
            command = [sys.executable, "-m", "agentcore_rl_toolkit.cli", "gateway", "serve", "--engine", "vllm"]
            command += ["--upstream", upstream_url, "--store", str(folder / "store"), "--ready-file", str(ready)]
            command += options
            if workers > 1:
                command += ["--workers", str(workers)]
            with process(command, core=1 if workers == 1 else None, stderr=subprocess.DEVNULL) as running:
                deadline = time.monotonic() + 30
                while not ready.exists():
                    if running.poll() is not None or time.monotonic() > deadline:
                        raise SystemExit("the gateway did not start")
                    time.sleep(0.05)
                url = json.loads(ready.read_text())["url"]
                ids = [f"bench-session-{i:06d}-{'x' * 24}" for i in range(sessions)]
                asked = urllib.request.Request(
                    url + "/admin/sessions",
                    json.dumps({"session_ids": ids}).encode(),
                    {"content-type": "application/json"},
                )
                told = json.loads(urllib.request.urlopen(asked, timeout=30).read())["sessions"]
                rows = [(f"/sessions/{s['session_id']}/v1/chat/completions", s["api_key"]) for s in told]
                yield Target(url, running.pid, targets_file(folder, rows))
        elif name == "rllm":
            port = free_port()
            command = [peer_python("rllm"), "-m", "rllm_model_gateway", "--host", "127.0.0.1", "--port", str(port)]
            command += ["--worker", upstream_url, "--store", "memory", "--log-level", "WARNING"]
            with process(command, core=1, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as running:
                wait_http(f"http://127.0.0.1:{port}/health")
                rows = [(f"/sessions/s{i}/v1/chat/completions", "k") for i in range(SESSIONS)]
                yield Target(f"http://127.0.0.1:{port}", running.pid, targets_file(folder, rows))
        else:
            port = free_port()
            script = folder / "toolkit_server.py"
            script.write_text(TOOLKIT_SERVER)
            command = [peer_python("toolkit"), str(script), upstream_url, str(port)]
            with process(command, core=1, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as running:
                wait_http(f"http://127.0.0.1:{port}/healthz")
                rows = [("/v1/chat/completions", f"s{i}") for i in range(SESSIONS)]
                yield Target(f"http://127.0.0.1:{port}", running.pid, targets_file(folder, rows))


# ---------------------------------------------------------------- checks that are no throughput


def cpu_ms(pid: int) -> float:
    """CPU time of a process so far, to the nanosecond where the kernel tells it."""
    total = 0
    for each in Path(f"/proc/{pid}/task").iterdir():
        total += int((each / "schedstat").read_text().split()[0])
    return total / 1e6


class Agent:
    """One keep-alive connection of a session, with nothing in between."""

    def __init__(self, url: str, path: str, key: str) -> None:
        parts = urllib.parse.urlsplit(url)
        self.connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)
        self.path = path
        self.headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}

    def ask(self, body: bytes) -> bytes:
        self.connection.request("POST", self.path, body, self.headers)
        return self.connection.getresponse().read()


def check_history(url: str, turns: int = 200, tokens: int = 100_000) -> dict[str, float]:
    """Gateway CPU of a late turn against an early one, in a session that grows to `tokens` of context."""
    with gateway("ours", url) as target:
        assert target.pid is not None
        path, key = target.sessions.read_text().split("\n")[0].split()
        agent = Agent(target.url, path, key)
        step = tokens // turns
        messages: list[dict[str, str]] = []
        spent = []
        for turn in range(turns):
            messages.append({"role": "user", "content": "word " * (step - 64)})
            asked = {"model": f"history-{(turn + 1) * step}", "messages": messages, "max_tokens": 64}
            body = json.dumps(asked, separators=(",", ":")).encode()
            before = cpu_ms(target.pid)
            agent.ask(body)
            time.sleep(0.003)
            spent.append(cpu_ms(target.pid) - before)
            messages.append({"role": "assistant", "content": "".join(f" word{i}" for i in range(64))})
        early, late = statistics.median(spent[1:8]), statistics.median(spent[-7:])
        return {"turn_2_cpu_ms": early, f"turn_{turns}_cpu_ms": late, "ratio": late / early}


def check_rendering(url: str, turns: int = 60) -> dict[str, float]:
    """Gateway CPU of a turn when the gateway tokenises (built-in policy's template), early and late in a session."""
    weights = ROOT / "src" / "agentcore_rl_toolkit" / "policy" / "weights"
    with gateway("ours", url, options=("--model", str(weights))) as target:
        assert target.pid is not None
        path, key = target.sessions.read_text().split("\n")[0].split()
        agent = Agent(target.url, path, key)
        messages: list[dict[str, str]] = [{"role": "system", "content": "Solve the problem. Use the calculator."}]
        spent = []
        for turn in range(turns):
            messages.append({"role": "user", "content": f"What is {turn} + {turn * 7}? " * 10})
            body = json.dumps({"model": "m", "messages": messages, "max_tokens": 64}, separators=(",", ":")).encode()
            before = cpu_ms(target.pid)
            told = json.loads(agent.ask(body))
            time.sleep(0.003)
            spent.append(cpu_ms(target.pid) - before)
            messages.append({"role": "assistant", "content": told["choices"][0]["message"]["content"]})
        early, late = statistics.median(spent[2:10]), statistics.median(spent[-8:])
        return {"early_cpu_ms": early, "late_cpu_ms": late, "ratio": late / early}


def check_bulk(url: str, sessions: int = 1000, turns: int = 10) -> dict[str, float]:
    """Serving CPU per fetched turn, and how long a call that runs meanwhile is held up at worst."""
    with gateway("ours", url) as target:
        assert target.pid is not None
        rows = [row.split() for row in target.sessions.read_text().splitlines()]
        body = json.dumps(
            {"model": "m", "messages": [{"role": "user", "content": "x" * 1000}], "max_tokens": 1024}
        ).encode()
        for path, key in rows[:sessions]:
            agent = Agent(target.url, path, key)
            for _ in range(turns):
                agent.ask(body)
        probe = Agent(target.url, *rows[-1])
        small = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 64}).encode()
        waits: list[float] = []
        stop = threading.Event()

        def run() -> None:
            while not stop.is_set():
                started = time.monotonic()
                probe.ask(small)
                waits.append((time.monotonic() - started) * 1000)

        thread = threading.Thread(target=run)
        thread.start()
        time.sleep(0.5)
        alone, idle_from = max(waits), len(waits)
        before_calls, before = len(waits), cpu_ms(target.pid)
        names = [path.split("/")[2] for path, _ in rows[:sessions]]
        asked = urllib.request.Request(
            target.url + "/admin/fetch",
            json.dumps({"session_ids": names}).encode(),
            {"content-type": "application/json"},
        )
        got = 0
        with urllib.request.urlopen(asked, timeout=120) as answer:
            while piece := answer.read(2**20):
                got += len(piece)
        spent, calls = cpu_ms(target.pid) - before, len(waits) - before_calls
        stop.set()
        thread.join()
        during = waits[idle_from:] or [0.0]
        return {
            "turns": sessions * turns,
            "mb": got / 1e6,
            "cpu_ms_per_turn": max(0.0, spent - calls * 0.2) / (sessions * turns),
            "worst_call_before_ms": alone,
            "worst_call_during_ms": max(during),
        }


def check_memory(url: str, sessions: int, turns: int) -> dict[str, float]:
    """Resident memory after many long sessions, and whether every turn comes back."""
    with gateway("ours", url, sessions=sessions) as target:
        assert target.pid is not None
        done = 0
        while done < sessions * turns:
            told = load(target.url, target.sessions, tokens=1024, stream=False, connections=64, seconds=10, calls=turns)
            done += int(told["requests"])
        rss = usage(target.pid)[1] / 1024
        told = json.loads(urllib.request.urlopen(target.url + "/admin/stats", timeout=30).read())
        names = [row.split("/")[2] for row in target.sessions.read_text().splitlines()]
        client = GatewayClient(target.url, timeout_s=120)
        found = 0
        for i in range(0, sessions, 100):
            found += sum(len(c.turns) for c in client.fetch(names[i : i + 100]).values())
        return {"turns": told["turns"], "found": found, "rss_mb": rss, "store_mb": told["journal_bytes"] / 1e6}


def check_realistic(agents: int) -> dict[str, float]:
    """Answers of 256 tokens streamed over 2 s: what the gateway adds to the median."""
    with upstream(think_s=2.0) as url:
        p50 = {}
        for name in ("direct", "ours"):
            with gateway(name, url) as target:
                told = load(target.url, target.sessions, tokens=256, stream=True, connections=agents, seconds=12)
                p50[name] = told["p50"]
    return {"agents": agents, "direct_p50_ms": p50["direct"], "added_p50_ms": p50["ours"] - p50["direct"]}


def check_workers(url: str) -> dict[str, float]:
    """Calls per second of one process and of two, without pinning, and the CPU they need per call."""
    rps, cpu = {}, {}
    for count in (1, 2):
        with gateway("ours", url, workers=count) as target:
            row = measure("ours", target, 64, False, 64, 5)
            rps[count], cpu[count] = row.rps, row.cpu_ms or 0.0
    return {"one_rps": rps[1], "two_rps": rps[2], "one_cpu_ms": cpu[1], "two_cpu_ms": cpu[2], "ratio": rps[2] / rps[1]}


def checks(url: str, *, quick: bool) -> dict[str, dict[str, float]]:
    results = {
        "history": check_history(url, *((40, 20_000) if quick else (200, 100_000))),
        "tokens rendered here": check_rendering(url),
        "bulk fetch": check_bulk(url, *((100, 10) if quick else (1000, 10))),
    }
    if not quick:
        results["memory"] = check_memory(url, 2500, 40)
        results["realistic load, 256 agents"] = check_realistic(256)
        results["realistic load, 1000 agents"] = check_realistic(1000)
        results["two processes"] = check_workers(url)
    for name, values in results.items():
        print(f"{name}: " + ", ".join(f"{k} {v:.3f}" for k, v in values.items()))
    return results


# ---------------------------------------------------------------- the table


@dataclass
class Row:
    gateway: str
    tokens: int
    stream: bool
    connections: int
    rps: float
    p50_ms: float
    p99_ms: float
    cpu_ms: float | None
    rss_kb: float | None
    errors: int


def measure(
    name: str, target: Target, tokens: int, stream: bool, connections: int, seconds: float, *, warm: bool = True
) -> Row:
    if warm:
        load(target.url, target.sessions, tokens=tokens, stream=stream, connections=connections, seconds=0.5)
    before = usage(target.pid) if target.pid else None
    told = load(target.url, target.sessions, tokens=tokens, stream=stream, connections=connections, seconds=seconds)
    after = usage(target.pid) if target.pid else None
    count = max(1, told["requests"])
    return Row(
        gateway=name,
        tokens=tokens,
        stream=stream,
        connections=connections,
        rps=told["requests"] / told["seconds"],
        p50_ms=told["p50"],
        p99_ms=told["p99"],
        cpu_ms=(after[0] - before[0]) * 1000 / count if before and after else None,
        rss_kb=(after[1] - before[1]) / count if before and after else None,
        errors=int(told["errors"]),
    )


def show(rows: list[Row]) -> None:
    names = list(dict.fromkeys(r.gateway for r in rows))
    head = f"\n{'tokens':>6} {'mode':>6} {'conn':>5}  {'gateway':<8} {'req/s':>9} {'p50 ms':>9} {'p99 ms':>9}"
    print(head + f" {'CPU ms':>8} {'RSS KB':>8} {'errors':>6}")
    for r in sorted(rows, key=lambda r: (r.tokens, r.stream, r.connections, names.index(r.gateway))):
        cpu = "-" if r.cpu_ms is None else f"{r.cpu_ms:.3f}"
        rss = "-" if r.rss_kb is None else f"{r.rss_kb:.2f}"
        mode = "stream" if r.stream else "whole"
        print(
            f"{r.tokens:>6} {mode:>6} {r.connections:>5}  {r.gateway:<8} {r.rps:>9.0f} {r.p50_ms:>9.2f} {r.p99_ms:>9.2f}"
            f" {cpu:>8} {rss:>8} {r.errors:>6}"
        )


def compare(rows: list[Row]) -> None:
    """Ours against each peer, cell by cell: requests per second, and CPU per request."""
    ours = {(r.tokens, r.stream, r.connections): r for r in rows if r.gateway == "ours"}
    for r in rows:
        mine = ours.get((r.tokens, r.stream, r.connections))
        if mine is None or r.gateway in ("ours", "direct") or not r.rps or not r.cpu_ms or not mine.cpu_ms:
            continue
        kind = f"{r.tokens} tokens {'streamed' if r.stream else 'whole'}, {r.connections} connections"
        print(
            f"{kind}: {mine.rps / r.rps:.1f}x the requests/s of {r.gateway}, 1/{r.cpu_ms / mine.cpu_ms:.1f} of its CPU"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few cells, short windows: under a minute")
    parser.add_argument("--json", metavar="FILE", help="write the rows there too")
    parser.add_argument("--only", default="direct,ours,rllm,toolkit", help="which gateways")
    parser.add_argument("--seconds", type=float, default=None, help="window per cell")
    parser.add_argument("--tokens", default="64,1024")
    parser.add_argument("--checks", action="store_true", help="only history, bulk fetch and memory")
    parser.add_argument("--connections", default=None)
    parser.add_argument("--serve-upstream", type=float, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve_upstream is not None:
        serve_upstream(0, args.serve_upstream)
        return
    if shutil.which("wrk") is None:
        raise SystemExit("this benchmark needs wrk (apt-get install wrk, brew install wrk)")
    seconds = args.seconds or (1.0 if args.quick else 5.0)
    connections = [int(c) for c in (args.connections or ("32" if args.quick else "1,32,256,1000")).split(",")]
    rows: list[Row] = []
    if args.checks:
        with upstream() as url:
            checks(url, quick=args.quick)
        return
    cells = [(tokens, stream) for tokens in (int(t) for t in args.tokens.split(",")) for stream in (False, True)]
    with upstream() as url:
        for name in args.only.split(","):
            # A fresh gateway for every kind of answer, or, to be quick, one for all of them.
            for group in [cells] if args.quick else [[cell] for cell in cells]:
                with gateway(name, url) as target:
                    for tokens, stream in group:
                        for count in connections:
                            rows.append(measure(name, target, tokens, stream, count, seconds, warm=not args.quick))
    show(rows)
    compare(rows)
    if args.json:
        Path(args.json).write_text(json.dumps([asdict(r) for r in rows], indent=1))


if __name__ == "__main__":
    main()
