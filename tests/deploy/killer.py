"""Between a command and AWS: what it asked is done, and then it is killed before it gets the answer, once for every kind of call.

So each run of a command goes one call further than the one before it, and leaves the account as a machine would whose power went
off just then. The bodies of the calls are kept, as they were on the wire.
"""

from __future__ import annotations

import functools
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import botocore.session

NOT_PASSED_ON = {"expect", "connection", "transfer-encoding", "content-length", "keep-alive"}
ENGINE = """\
#!/bin/sh
# What is asked of the engine is done, and then who asked is killed, once for each kind.
{engine} "$@"
code=$?
if [ -d {folder} ] && mkdir "{folder}/$1" 2>/dev/null; then kill -KILL "$PPID"; fi
exit $code
"""


def operation_of(method: str, path: str, headers: Mapping[str, str], body: bytes) -> str:
    """Service and operation of a request, such as `iam:CreateRole`; of S3 as far as the method says it."""
    target = headers.get("x-amz-target", "")
    if target:
        return f"ecr:{target.rpartition('.')[2]}"
    if headers.get("content-type", "").startswith("application/x-www-form-urlencoded"):
        action = parse_qs(body.decode())["Action"][0]
        return f"{'sts' if action == 'GetCallerIdentity' else 'iam'}:{action}"
    for verb, pattern, name in _routes():
        if verb == method and pattern.fullmatch(urlsplit(path).path):
            return f"bedrock-agentcore:{name}"
    kind = "Object" if urlsplit(path).path.strip("/").count("/") else "Bucket"
    verbs = {
        "HEAD": "Head",
        "PUT": "Create" if kind == "Bucket" else "Put",
        "GET": "List" if kind == "Bucket" else "Get",
    }
    return f"s3:{verbs.get(method, method.title())}{kind}"


@functools.cache
def _routes() -> list[tuple[str, re.Pattern[str], str]]:
    """Method, path and name of AgentCore's operations, as botocore's models have them."""
    found = []
    for service in ("bedrock-agentcore", "bedrock-agentcore-control"):
        model = botocore.session.get_session().get_service_model(service)
        for name in model.operation_names:
            wire = model.operation_model(name).http
            pattern = re.sub(r"\\{[^}]+\\}", "[^/]+", re.escape(wire["requestUri"].partition("?")[0]))
            found.append((str(wire["method"]), re.compile(pattern), name))
    return found


class Killer:
    """``done``: kinds of calls after which a command was killed. ``bodies``: of all calls, with their kinds."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.bodies: list[tuple[str, bytes]] = []
        self.kills = True
        self._pid: int | None = None
        self._known, self._lock = threading.Event(), threading.Lock()

    def begin(self) -> None:
        self._known.clear()

    def aim(self, pid: int) -> None:
        self._pid = pid
        self._known.set()

    def answered(self, operation: str, body: bytes) -> bool:
        """Whether the answer to a call goes to who asked. Else it was killed."""
        with self._lock:
            self.bodies.append((operation, body))
            if not self.kills or operation in self.done:
                return True
            self.done.append(operation)
        assert self._known.wait(60)
        assert self._pid is not None
        os.kill(self._pid, signal.SIGKILL)
        return False


class Between(ThreadingHTTPServer):
    """Passes requests on to one address."""

    daemon_threads = True

    def __init__(self, address: str, killer: Killer) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.behind, self.killer = urlsplit(address).netloc, killer
        threading.Thread(target=self.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def close(self) -> None:
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Between

    def log_message(self, format: str, *arguments: object) -> None:
        pass

    def _pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        headers = {k: v for k, v in self.headers.items() if k.lower() not in NOT_PASSED_ON}
        connection = http.client.HTTPConnection(self.server.behind, timeout=300)
        try:
            connection.request(self.command, self.path, body or None, headers)
            reply = connection.getresponse()
            content = reply.read()
        finally:
            connection.close()
        asked = {k.lower(): v for k, v in self.headers.items()}
        self.close_connection = True
        if not self.server.killer.answered(operation_of(self.command, self.path, asked, body), body):
            return
        self.send_response(reply.status)
        for name, value in reply.getheaders():
            if name.lower() not in NOT_PASSED_ON:
                self.send_header(name, value)
        length = reply.getheader("content-length") if self.command == "HEAD" else str(len(content))
        self.send_header("content-length", length or "0")
        self.send_header("connection", "close")
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _pass_on


class WarmCli:
    """Runs `agentcore-rl` in children of one process, in a folder."""

    def __init__(self, process: subprocess.Popen[str], folder: Path, killer: Killer) -> None:
        self._process, self._folder, self._killer = process, folder, killer

    def run(self, words: Sequence[str]) -> tuple[int, str]:
        """Exit code, negative for a signal, and what was printed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        output = self._folder / "printed"
        self._killer.begin()
        self._process.stdin.write(json.dumps({"words": list(words), "output": str(output)}) + "\n")
        self._process.stdin.flush()
        self._killer.aim(int(self._process.stdout.readline()))
        return int(self._process.stdout.readline()), output.read_text()

    def run_until_it_ends(self, words: Sequence[str], *, at_most: int) -> tuple[str, int]:
        """Run the same command until it is not killed any more. Gives what the last one printed, and how many were killed."""
        for killed in range(at_most):
            code, printed = self.run(words)
            if code != -signal.SIGKILL:
                assert code == 0, printed
                return printed, killed
        raise AssertionError(f"killed {at_most} times: {self._killer.done}")


@contextmanager
def warm_cli(folder: Path, environment: Mapping[str, str], killer: Killer) -> Iterator[WarmCli]:
    with subprocess.Popen(
        [sys.executable, str(Path(__file__).parent / "warm_cli.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=folder,
        env=dict(environment),
    ) as process:
        yield WarmCli(process, folder, killer)


def deadly_engine(folder: Path, engine: str) -> tuple[Path, Path]:
    """A command that runs the engine and kills who asked, once for each of its commands: its path, and where it notes them."""
    notes, command = folder / "engine-steps", folder / Path(engine).name
    notes.mkdir()
    command.write_text(ENGINE.format(engine=engine, folder=notes))
    command.chmod(0o755)
    return command, notes
