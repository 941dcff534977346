"""The gateways under test, each in front of the same engine with what it can record switched on."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .processes import BENCHMARKS, GATEWAY_CORE, Server, free_port, process, wait_http

VENVS = BENCHMARKS.parent / ".venvs"
WEIGHTS = BENCHMARKS.parent / "src" / "agentcore_rl_toolkit" / "policy" / "weights"
PEERS = {"rllm": "rllm-model-gateway==0.1.0", "toolkit": "agentcore-rl-toolkit[gateway]==0.2.0"}
NAMES = ("direct", "ours", "rllm", "toolkit", "ours+tok")
MEANING = {
    "direct": "no gateway",
    "ours": "this gateway: sessions, keys, de-duplication, capture and the store on disk",
    "rllm": f"{PEERS['rllm']}, its memory store (the faster of its two)",
    "toolkit": f"{PEERS['toolkit']}, vLLM backend, a renderer that costs nothing; streams are whole answers cut in three",
    "ours+tok": "this gateway rendering and tokenizing prompts itself (--model), which `ours` and `rllm` leave to the server",
}
SESSIONS = 2000

# Its renderer returns ready ids, so the measurement is of the gateway and not of a tokenizer.
TOOLKIT_SERVER = '''
import sys
from aiohttp import web
from agentcore_rl_toolkit.rollout_gateway import RolloutGateway
from agentcore_rl_toolkit.rollout_gateway.render import ParsedOutput
from agentcore_rl_toolkit.rollout_gateway.sampling_backends.vllm_http import VllmHttpBackend

PROMPT = [(i * 7919) % 150_000 for i in range(512)]

class Renderer:
    """Costs nothing."""
    async def render(self, *args, **kwargs): return list(PROMPT)
    def get_stop_sequences(self): return []
    def parse(self, ids, *args, **kwargs): return ParsedOutput(reasoning="", text="word" * len(ids), tool_uses=[])

gateway = RolloutGateway(backend=VllmHttpBackend(sys.argv[1]), renderer=Renderer(), adapters=["openai"])
web.run_app(gateway.app, host="127.0.0.1", port=int(sys.argv[2]), print=None, access_log=None, backlog=4096)
'''


@dataclass(frozen=True)
class Target:
    """A gateway under test. `sessions` is a file of lines "path key"; `pid` is None where there is no gateway."""

    name: str
    url: str
    pid: int | None
    sessions: Path

    def rows(self) -> list[tuple[str, str]]:
        return [(a, b) for a, b in (line.split() for line in self.sessions.read_text().splitlines())]

    def names(self) -> list[str]:
        """Ids of ours' sessions."""
        return [path.split("/")[2] for path, _ in self.rows()]

    def ask(self, path: str, body: Any = None, timeout_s: float = 60) -> Any:
        """An administrative call."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return json.loads(answer.read())


def installed(name: str) -> bool:
    return name not in PEERS or _python(name).exists()


def _python(name: str) -> Path:
    return VENVS / f"bench-{name}" / "bin" / "python"


def install(name: str) -> None:
    """A peer's own environment, made once from the package index."""
    if installed(name):
        return
    beside = Path(sys.executable).parent / "uv"
    uv = str(beside) if beside.exists() else "uv"
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    print(f"installing {PEERS[name]} into {_python(name).parent.parent}", file=sys.stderr)
    subprocess.run([uv, "venv", "-q", "--clear", "--python", version, str(_python(name).parent.parent)], check=True)
    subprocess.run([uv, "pip", "install", "-q", "--python", str(_python(name)), PEERS[name]], check=True)


@contextmanager
def gateway(
    name: str,
    server: Server,
    *,
    sessions: int = SESSIONS,
    core: int | None = GATEWAY_CORE,
) -> Iterator[Target]:
    """Start one of `NAMES` in front of an engine."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        rows = folder / "sessions.txt"
        quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": folder}
        stderr_file = folder / "stderr.txt"
        if name == "direct":
            rows.write_text("/v1/chat/completions k\n")
            yield Target(name, server.url, None, rows)
        elif name in PEERS:
            # -E: a PYTHONPATH of ours would give the toolkit's process this package instead of the published one.
            python = [str(_python(name)), "-E"]
            port = free_port()
            url = f"http://127.0.0.1:{port}"
            if name == "rllm":
                command = [*python, "-m", "rllm_model_gateway", "--host", "127.0.0.1", "--port", str(port)]
                command += ["--worker", server.url, "--store", "memory", "--log-level", "WARNING"]
                lines, health = [f"/sessions/s{i}/v1/chat/completions k" for i in range(sessions)], "/health"
            else:
                script = folder / "toolkit_server.py"
                script.write_text(TOOLKIT_SERVER)
                command = [*python, str(script), server.url, str(port)]
                lines, health = [f"/v1/chat/completions s{i}" for i in range(sessions)], "/healthz"
            rows.write_text("\n".join(lines) + "\n")
            with process(command, core=core, **quiet) as running:
                wait_http(url + health, running)
                yield Target(name, url, running.pid, rows)
        else:
            ready = folder / "ready.json"
            command = [
                sys.executable,
                "-m",
                "agentcore_rl_toolkit.cli",
                "gateway",
                "serve",
                "--no-admin-key",
                "--engine",
                "vllm",
            ]
            command += ["--upstream", server.url, "--store", str(folder / "store"), "--ready-file", str(ready)]
            if name == "ours+tok":
                command += ["--model", str(WEIGHTS)]
            with (
                stderr_file.open("wb") as stderr,
                process(command, core=core, **{**quiet, "stderr": stderr}) as running,
            ):
                deadline = time.monotonic() + 60
                while not ready.exists():
                    if running.poll() is not None or time.monotonic() > deadline:
                        raise SystemExit(f"the gateway did not start: {stderr_file.read_text()[-2000:]}")
                    time.sleep(0.05)
                target = Target(name, json.loads(ready.read_text())["url"], running.pid, rows)
                ids = [f"bench-session-{i:06d}-{'x' * 24}" for i in range(sessions)]
                opened = target.ask("/admin/sessions", {"session_ids": ids})["sessions"]
                rows.write_text(
                    "".join(f"/sessions/{s['session_id']}/v1/chat/completions {s['api_key']}\n" for s in opened)
                )
                yield target
