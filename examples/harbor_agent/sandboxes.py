"""The sandboxes of tasks: a container, a Bubblewrap sandbox with this machine's programs, or the session's file system.

All three have the task's absolute paths (`/app`, `/tests`, `/logs`), which is what Harbor's tasks are written for.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import io
import json
import os
import selectors
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import dockerfiles
import sandbox_server
from harbor_tasks import HarborTask

KIND_ENV = "HARBOR_SANDBOX"
START_LIMIT_S = 60.0
GRACE_S = 10.0  # beyond a command's own limit, for the answer
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# Files of /etc that programs need, without accounts, keys, or configuration of this machine.
_ETC = "alternatives ld.so.cache ld.so.conf ld.so.conf.d localtime mime.types nsswitch.conf os-release perl protocols services"
_ETC_WITH_NETWORK = "hosts resolv.conf ssl ca-certificates"


class SandboxError(RuntimeError):
    """A sandbox could not be started, or has ended. The message contains the next step."""


@dataclass(frozen=True, kw_only=True)
class Ran:
    """A finished command. ``code`` is None if it took too long."""

    code: int | None
    output: str


class Sandbox(Protocol):
    """The environment of a task. Use it as a context manager, which builds and starts it."""

    isolated: str

    @property
    def workdir(self) -> str: ...

    def run(self, argv: Sequence[str], *, limit_s: float, env: Mapping[str, str] | None = None) -> Ran: ...

    def write(self, folder: str, files: Mapping[str, bytes], *, empty_first: bool = False) -> None: ...

    def read(self, path: str) -> bytes | None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class _Served(ABC):
    """The common part of the sandboxes that execute the Dockerfile themselves and use `sandbox_server`."""

    isolated = ""

    def __init__(self, task: HarborTask) -> None:
        self.task = task
        settings = task.settings.environment
        try:
            self._plan = dockerfiles.plan(task.environment.get("Dockerfile", b"").decode(), _without(task.environment))
        except ValueError as e:
            raise SandboxError(f"task {task.name} needs a container engine: {e}") from e
        self._workdir = settings.workdir or self._plan.workdir
        self._env = {"PATH": _PATH, "HOME": "/root", "LANG": "C.UTF-8", **self._plan.env, **settings.env}

    @property
    def workdir(self) -> str:
        return self._workdir

    @abstractmethod
    def _ask(self, request: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        """The sandbox's answer to a request."""

    def _follow_dockerfile(self) -> None:
        limit_s = self.task.settings.environment.build_timeout_sec
        deadline_s = time.monotonic() + limit_s
        for step in self._plan.steps:
            if isinstance(step, dockerfiles.Copy):
                self.write(step.folder, step.files)
                continue
            left_s = max(0.1, deadline_s - time.monotonic())
            ran = self._run(step.argv, step.workdir, {**self._env, **step.env}, left_s)
            if ran.code != 0:
                how = f"took longer than {limit_s:g} s" if ran.code is None else f"ended with {ran.code}"
                raise SandboxError(
                    f"task {self.task.name} needs a container engine: without its image, RUN {step.argv[-1][:200]!r} {how}: "
                    f"{ran.output[-500:]}"
                )

    def run(self, argv: Sequence[str], *, limit_s: float, env: Mapping[str, str] | None = None) -> Ran:
        return self._run(argv, self._workdir, {**self._env, **(env or {})}, limit_s)

    def _run(self, argv: Sequence[str], cwd: str, env: Mapping[str, str], limit_s: float) -> Ran:
        request = {"do": "run", "argv": list(argv), "cwd": cwd, "env": dict(env), "limit_s": limit_s}
        answer = self._ask(request, limit_s + GRACE_S)
        return Ran(code=answer["code"], output=answer["output"])

    def write(self, folder: str, files: Mapping[str, bytes], *, empty_first: bool = False) -> None:
        packed = {path: base64.b64encode(data).decode() for path, data in files.items()}
        self._ask({"do": "write", "folder": folder, "files": packed, "empty_first": empty_first}, START_LIMIT_S)

    def read(self, path: str) -> bytes | None:
        data = self._ask({"do": "read", "path": path}, START_LIMIT_S)["data"]
        return None if data is None else base64.b64decode(data)


class BubblewrapSandbox(_Served):
    """A Bubblewrap sandbox with the programs of this machine, without its other files and processes.

    The process of the agent is outside, and sends requests to process 1 inside. Memory, CPU and disk are not limited.
    """

    isolated = (
        "files, processes and, where the task has none, the network; not memory and CPU; programs are this machine's"
    )

    def __enter__(self) -> Self:
        self._errors = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            self._command(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, env={}, close_fds=True
        )
        try:
            for folder in ("/logs/verifier", "/logs/agent", "/tests"):
                self.write(folder, {})
            self._follow_dockerfile()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()  # the kernel ends all of its process namespace with it
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):  # the buffer may contain an unread request
                    pipe.close()

    def _command(self) -> list[str]:
        program = shutil.which("bwrap")
        if program is None:
            raise SandboxError("bwrap is not installed; on Debian and Ubuntu: apt-get install bubblewrap")
        network = self.task.settings.environment.network
        python = os.path.realpath(Path(sys.base_prefix) / "bin" / "python3")
        out = [
            program,
            "--unshare-all",
            "--unshare-user",
            "--uid",
            "0",
            "--gid",
            "0",
            "--hostname",
            "sandbox",
            "--die-with-parent",
        ]
        out += ["--as-pid-1", "--new-session", "--cap-drop", "ALL", "--clearenv", "--ro-bind", "/usr", "/usr"]
        out += ["--share-net"] if network else []
        for name in ("bin", "sbin", "lib", "lib32", "lib64"):
            if os.path.islink(f"/{name}"):
                out += ["--symlink", os.readlink(f"/{name}"), f"/{name}"]
            elif os.path.isdir(f"/{name}"):
                out += ["--ro-bind", f"/{name}", f"/{name}"]
        for name in (_ETC + " " + _ETC_WITH_NETWORK if network else _ETC).split():
            out += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
        if not Path(sys.base_prefix).is_relative_to("/usr"):
            out += ["--ro-bind", sys.base_prefix, sys.base_prefix]
        self._env["PATH"] = f"{self._env['PATH']}:{sys.base_prefix}/bin"
        out += [
            "--dev",
            "/dev",
            "--proc",
            "/proc",
            "--tmpfs",
            "/tmp",
            "--dir",
            "/root",
            "--dir",
            "/var/tmp",
            "--dir",
            "/run",
        ]
        # The server's folder may be hidden in the sandbox, so its text is passed.
        return [*out, "--", python, "-I", "-c", Path(sandbox_server.__file__).read_text()]

    def _ask(self, request: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            stdin.write(json.dumps(request).encode() + b"\n")
            stdin.flush()
            line = _line(stdout, limit_s)
        except BrokenPipeError:
            line = b""
        if not line.endswith(b"\n"):
            self._errors.seek(0)
            why = self._errors.read()[-500:].decode(errors="replace").strip()
            raise SandboxError(
                f"the sandbox of task {self.task.name} ended or did not answer in {limit_s:g} s: {why or 'no message'}. "
                f"Where Bubblewrap is not allowed inside sessions, start the runtime with --isolation none, or set {KIND_ENV}"
            )
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise SandboxError(f"the sandbox of task {self.task.name}: {answer['error']}")
        return answer


class PodmanSandbox:
    """A container of the task's own image, built from its Dockerfile at the first use and kept under a hash of it."""

    isolated = "files, processes, memory, CPU and, where the task has no network, the network; the kernel is shared"

    def __init__(self, task: HarborTask) -> None:
        self.task = task
        self._name = f"harbor-{uuid.uuid4().hex}"
        self._workdir = task.settings.environment.workdir or ""

    @property
    def workdir(self) -> str:
        return self._workdir

    def __enter__(self) -> Self:
        settings = self.task.settings.environment
        image = self._image()
        if not self._workdir:
            self._workdir = (
                self._podman("image", "inspect", "-f", "{{.Config.WorkingDir}}", image).decode().strip() or "/"
            )
        limits = ["--memory", f"{settings.memory_mb}m", "--cpus", str(settings.cpus)]
        limits += [] if settings.network else ["--network", "none"]
        env = [f"--env={name}={value}" for name, value in settings.env.items()]
        command = [
            "run",
            "-d",
            "--rm",
            "--name",
            self._name,
            *limits,
            *env,
            "--entrypoint",
            "sleep",
            image,
            "infinity",
        ]
        self._podman(*command, limit_s=settings.build_timeout_sec)
        for folder in ("/logs/verifier", "/logs/agent", "/tests"):
            self.write(folder, {})
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._podman("rm", "-f", "-t", "0", "--ignore", self._name)

    def run(self, argv: Sequence[str], *, limit_s: float, env: Mapping[str, str] | None = None) -> Ran:
        variables = [f"--env={name}={value}" for name, value in (env or {}).items()]
        command = [
            "exec",
            "-w",
            self._workdir,
            *variables,
            self._name,
            "timeout",
            "-s",
            "KILL",
            f"{limit_s:.3f}",
            *argv,
        ]
        began_s = time.monotonic()
        with tempfile.TemporaryFile() as output:
            try:
                done = subprocess.run(
                    ["podman", *command],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    timeout=limit_s + GRACE_S,
                    check=False,
                )
                code: int | None = done.returncode
            except subprocess.TimeoutExpired:
                code = None
            size = output.seek(0, os.SEEK_END)
            output.seek(max(0, size - sandbox_server.MAX_OUTPUT))
            text = output.read().decode(errors="replace")
        return Ran(code=None if code == 137 and time.monotonic() - began_s >= limit_s else code, output=text)

    def write(self, folder: str, files: Mapping[str, bytes], *, empty_first: bool = False) -> None:
        clear = 'rm -rf "$0" && ' if empty_first else ""
        self._podman("exec", "-u", "0", self._name, "sh", "-c", f'{clear}mkdir -p "$0" && chmod 777 "$0"', folder)
        if files:
            self._podman("cp", "-", f"{self._name}:{folder}", given=_tar(files))

    def read(self, path: str) -> bytes | None:
        try:
            packed = self._podman("cp", f"{self._name}:{path}", "-")
        except SandboxError:
            return None
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            member = archive.next()
            content = archive.extractfile(member) if member is not None and member.isfile() else None
            return content.read(sandbox_server.MAX_FILE) if content is not None else None

    def _image(self) -> str:
        settings = self.task.settings.environment
        if "Dockerfile" not in self.task.environment:
            if settings.docker_image is None:
                raise SandboxError(f"task {self.task.name} has neither environment/Dockerfile nor a docker_image")
            return settings.docker_image
        digest = hashlib.sha256(
            json.dumps(sorted((p, d.hex()) for p, d in self.task.environment.items())).encode()
        ).hexdigest()
        image = f"localhost/harbor-task:{digest[:24]}"
        if subprocess.run(["podman", "image", "exists", image], check=False, timeout=START_LIMIT_S).returncode != 0:
            with tempfile.TemporaryDirectory(prefix="harbor-image-") as folder:
                for path, data in self.task.environment.items():
                    (Path(folder) / path).parent.mkdir(parents=True, exist_ok=True)
                    (Path(folder) / path).write_bytes(data)
                self._podman("build", "-q", "-t", image, folder, limit_s=settings.build_timeout_sec)
        return image

    def _podman(self, *arguments: str, limit_s: float = START_LIMIT_S, given: bytes | None = None) -> bytes:
        try:
            done = subprocess.run(
                ["podman", *arguments], input=given or b"", capture_output=True, timeout=limit_s, check=False
            )
        except subprocess.TimeoutExpired:
            raise SandboxError(f"task {self.task.name}: podman {arguments[0]} took longer than {limit_s:g} s") from None
        if done.returncode != 0:
            why = done.stderr[-500:].decode(errors="replace").strip()
            raise SandboxError(f"task {self.task.name}: podman {arguments[0]} ended with {done.returncode}: {why}")
        return done.stdout


class SessionSandbox(_Served):
    """The file system of the session, for AgentCore, where a session is a separate machine with one task.

    Commands of the task can reach the process of the agent. `/app`, `/tests` and `/logs` must be writable.
    """

    isolated = "nothing: commands have the rights of the agent's process"

    def __enter__(self) -> Self:
        try:
            for folder in ("/logs/verifier", "/logs/agent", "/tests", "/solution", self._workdir):
                os.makedirs(folder, exist_ok=True)
                if not os.access(folder, os.W_OK):
                    raise PermissionError(13, "not writable", folder)
                if os.listdir(folder):
                    raise SandboxError(
                        f"{folder} is not empty: a session without a sandbox runs one task, on its own machine"
                    )
        except OSError as e:
            raise SandboxError(
                f"{e.filename} cannot be used: {e.strerror}; make /app, /tests, /logs and /solution in the image, for its user "
                f"(as the Dockerfile of this example does), or set {KIND_ENV} to bubblewrap or podman"
            ) from e
        self._follow_dockerfile()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the sandbox with the session."""

    def _ask(self, request: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        try:
            answer: dict[str, Any] = sandbox_server.DO[request["do"]](request)
        except OSError as e:
            raise SandboxError(f"task {self.task.name}: {e}") from e
        return answer


def choose(task: HarborTask, kind: str | None = None) -> Sandbox:
    """Return the sandbox of a task: ``kind``, HARBOR_SANDBOX, or the first that works here. Raises: SandboxError."""
    kind = kind or os.environ.get(KIND_ENV) or _first()
    if kind not in KINDS:
        raise SandboxError(f"{KIND_ENV} is {kind!r}; there are: {', '.join(KINDS)}")
    return KINDS[kind](task)


KINDS: dict[str, Callable[[HarborTask], Sandbox]] = {
    "podman": PodmanSandbox,
    "bubblewrap": BubblewrapSandbox,
    "session": SessionSandbox,
}


@functools.cache
def _first() -> str:
    if shutil.which("podman"):
        with contextlib.suppress(subprocess.TimeoutExpired):
            if subprocess.run(["podman", "info"], capture_output=True, check=False, timeout=10).returncode == 0:
                return "podman"
    return "bubblewrap" if shutil.which("bwrap") else "session"


def _tar(files: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path, data in files.items():
            info = tarfile.TarInfo(path)
            info.size, info.mode = len(data), 0o755 if data.startswith(b"#!") else 0o644
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def _without(environment: Mapping[str, bytes]) -> dict[str, bytes]:
    return {path: data for path, data in environment.items() if path != "Dockerfile"}


def _line(pipe: Any, limit_s: float) -> bytes:
    """Return a line of a pipe, or its beginning if the deadline passes or the pipe ends."""
    deadline_s = time.monotonic() + limit_s
    line = bytearray()
    with selectors.DefaultSelector() as waiting:
        waiting.register(pipe, selectors.EVENT_READ)
        while not line.endswith(b"\n"):
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not waiting.select(left_s):
                break
            piece = os.read(pipe.fileno(), 1 << 16)
            if not piece:
                break
            line += piece
    return bytes(line)
