"""An API server that holds SandboxClaims and speaks HTTP and the API's JSON; and one whose pods are processes of this machine."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

TOKEN = "a-token"
CLAIMS = "/apis/extensions.agents.x-k8s.io/v1beta1/namespaces/rollouts/sandboxclaims"
Reply = tuple[int, dict[str, str], Any]


class ScriptedServer:
    """Holds claims as the API server would; replies put into ``script`` are given first, in order."""

    def __init__(self) -> None:
        self.claims: dict[str, dict[str, Any]] = {}
        self.requests: list[tuple[str, str, Any]] = []
        self.script: list[Reply] = []
        self.on_get: Callable[[dict[str, Any]], None] = lambda claim: None
        self.page = 500
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                length = int(self.headers.get("Content-Length", "0"))
                body = json.loads(self.rfile.read(length)) if length else None
                status, headers, content = outer.reply(self.command, self.path, body, self.headers)
                data = content if isinstance(content, bytes) else json.dumps(content).encode()
                self.send_response(status)
                for name, value in {
                    "Content-Type": "application/json",
                    "Content-Length": str(len(data)),
                    **headers,
                }.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = do_DELETE = answer

            def log_message(self, format: str, *args: Any) -> None:
                return None

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,))
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join(5)

    def reply(self, method: str, target: str, body: Any, headers: Any) -> Reply:
        url = urllib.parse.urlsplit(target)
        self.requests.append((method, target, body))
        if headers.get("Authorization") != f"Bearer {TOKEN}":
            return failure(401, "Unauthorized", "Unauthorized")
        if self.script:
            return self.script.pop(0)
        name = url.path.removeprefix(CLAIMS).strip("/")
        if not url.path.startswith(CLAIMS):
            return failure(404, "NotFound", "the server could not find the requested resource")
        if method == "POST":
            return self._create(body)
        if not name:
            return self._list(dict(urllib.parse.parse_qsl(url.query)))
        claim = self.claims.get(name)
        if claim is None:
            return failure(404, "NotFound", f'sandboxclaims.extensions.agents.x-k8s.io "{name}" not found')
        if method == "DELETE":
            assert body["kind"] == "DeleteOptions"
            return 200, {}, self.claims.pop(name)
        self.on_get(claim)
        return 200, {}, claim

    def _create(self, body: Any) -> Reply:
        name = body["metadata"]["name"]
        if not re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", name) or len(name) > 63:
            return failure(422, "Invalid", f"metadata.name: Invalid value: {name!r}")
        if not body["spec"].get("warmPoolRef", {}).get("name"):
            return failure(422, "Invalid", "spec.warmPoolRef: Required value")
        if name in self.claims:
            return failure(409, "AlreadyExists", f'sandboxclaims.extensions.agents.x-k8s.io "{name}" already exists')
        self.claims[name] = body
        return 201, {}, body

    def _list(self, query: dict[str, str]) -> Reply:
        wanted = dict(pair.split("=") for pair in query["labelSelector"].split(","))
        items = [c for c in self.claims.values() if wanted.items() <= c["metadata"]["labels"].items()]
        start = int(query.get("continue", "0"))
        rest = start + self.page < len(items)
        metadata = {"continue": str(start + self.page)} if rest else {}
        return 200, {}, {"kind": "SandboxClaimList", "metadata": metadata, "items": items[start : start + self.page]}


def failure(code: int, reason: str, message: str, **headers: str) -> Reply:
    return code, headers, {"kind": "Status", "status": "Failure", "reason": reason, "message": message, "code": code}


def condition(kind: str, status: str, reason: str = "DependenciesReady") -> dict[str, str]:
    return {"type": kind, "status": status, "reason": reason, "message": f"{kind} is {status}"}


class PodServer(ScriptedServer):
    """Every claim gets a pod: a process that serves the agent on port 8080 of a loopback address of its own.

    ``capacity`` is the namespace's quota of claims; ``pending`` holds pods back; ``pods`` are the processes by claim.
    """

    def __init__(self, agent: Path, folder: Path) -> None:
        self.agent = agent
        self.folder = folder
        self.capacity = 100
        self.pending = False
        self.pods: dict[str, subprocess.Popen[bytes]] = {}
        self.addresses: dict[str, str] = {}
        self.lost: set[str] = set()  # pods on a machine that does not answer any more
        # The port is fixed, so the addresses must differ from those of other runs of these tests on this machine.
        self._network = f"127.{random.randrange(16, 240)}.{random.randrange(256)}"
        self._numbers = itertools.count(2)
        self._lock = threading.Lock()
        super().__init__()

    def close(self) -> None:
        super().close()
        for process in self.pods.values():
            process.kill()
            process.wait()

    def reply(self, method: str, target: str, body: Any, headers: Any) -> Reply:
        with self._lock:
            self._look()
            name = urllib.parse.urlsplit(target).path.removeprefix(CLAIMS).strip("/")
            if method == "DELETE" and name in self.claims and not self.script:
                self.requests.append((method, target, body))
                return self._end(name, body.get("gracePeriodSeconds", 30))
            if method == "POST" and len(self.claims) >= self.capacity and not self.script:
                self.requests.append((method, target, body))
                return failure(403, "Forbidden", "exceeded quota: claims, requested: count=1")
            answer = super().reply(method, target, body, headers)
            if method == "POST" and answer[0] == 201:
                self._start(body["metadata"]["name"])
            return answer

    def _start(self, name: str) -> None:
        address = self.addresses[name] = f"{self._network}.{next(self._numbers)}"
        code = (
            "import runpy, sys\n"
            "app = runpy.run_path(sys.argv[1])['app']\n"
            "app.run(port=8080, host=sys.argv[2], access_log=False)\n"
        )
        with (self.folder / f"{name}.log").open("wb") as output:
            self.pods[name] = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-c", code, str(self.agent), address],
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def _look(self) -> None:
        """What the controller would write into each claim's status."""
        for name, process in list(self.pods.items()):
            claim = self.claims.get(name)
            if claim is None:
                continue
            if process.poll() is not None:
                if "deletionTimestamp" in claim["metadata"]:
                    del self.claims[name]
                else:
                    claim["status"] = {"conditions": [condition("Finished", "True", "PodSucceeded")]}
                continue
            up = not self.pending and name not in self.lost and self._answers(self.addresses[name])
            claim["status"] = {"conditions": [condition("Ready", str(up), "DependenciesReady" if up else "NodeLost")]}
            if up:
                claim["status"]["sandbox"] = {"name": f"pod-{name}", "podIPs": [self.addresses[name]]}

    @staticmethod
    def _answers(address: str) -> bool:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://{address}:8080/ping", timeout=2) as reply:
            return bool(reply.status == 200)
        return False

    def _end(self, name: str, grace_s: int) -> Reply:
        claim, process = self.claims[name], self.pods[name]
        claim["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        process.send_signal(signal.SIGTERM if grace_s else signal.SIGKILL)

        def kill() -> None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(grace_s)
            process.kill()

        threading.Thread(target=kill, daemon=True).start()
        return 200, {}, claim

    def kill(self, name: str) -> None:
        """As if the pod's process ended by itself."""
        self.pods[name].kill()
        self.pods[name].wait()

    def alive(self) -> list[str]:
        return [name for name, process in self.pods.items() if process.poll() is None]

    def settle(self, within_s: float = 20.0) -> None:
        """Wait until no pod runs."""
        deadline = time.monotonic() + within_s
        while self.alive():
            assert time.monotonic() < deadline, f"pods are left: {self.alive()}"
            time.sleep(0.05)
