"""Sessions in real processes, as root and as an ordinary user, through the tests' own launcher."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

import agentcore_rl_toolkit
from agentcore_rl_toolkit.isolation import IsolationSpec

ROOT = Path(agentcore_rl_toolkit.__file__).parent
DRIVER = Path(__file__).with_name("driver.py")
NOBODY = 65534
SYSTEM_PYTHON = "/usr/bin/python3"

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="namespaces and Landlock are Linux's")


@dataclass
class Session:
    """One session of a test: code, and what its spec adds."""

    code: str
    stays: bool = False
    plain_fork: bool = False
    into: int | None = None
    env: dict[str, str] | None = None
    timeout_s: float = 120
    spec: dict[str, Any] = field(default_factory=dict)


@dataclass
class Result:
    reported: Any
    status: int | str
    alive_after: bool | None
    pid: int


class Launcher:
    """Runs sessions under one tier as one user. ``folder`` holds a folder per session, named s0, s1, ..."""

    def __init__(self, tier: str, user: str, folder: Path) -> None:
        self.tier, self.user, self.folder = tier, user, folder
        self.errors = ""
        ordinary = user == "ordinary" and os.geteuid() == 0
        self.python = SYSTEM_PYTHON if ordinary else sys.executable
        self.identity: dict[str, Any] = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if ordinary else {}

    def spec(self, number: int, **changes: Any) -> IsolationSpec:
        directory = self.folder / f"s{number}"
        directory.mkdir(exist_ok=True)
        if self.identity:
            os.chown(directory, NOBODY, NOBODY)
        system = None if not self.identity else tuple(p for p in _SYSTEM if p.exists())
        name = f"test-{os.getpid()}-{self.folder.name}-s{number}"
        return IsolationSpec(session_dir=directory, name=name, system=system, **changes)

    def order(self, sessions: list[Session]) -> str:
        entries = []
        for number, session in enumerate(sessions):
            spec = self.spec(session.into if session.into is not None else number, **session.spec)
            entry = {k: v for k, v in vars(session).items() if k != "spec"}
            entries.append({**entry, "spec": asdict(replace(spec, env=None))})
        return json.dumps({"root": str(ROOT), "tier": self.tier, "sessions": entries}, default=str)

    def start(self, *sessions: Session) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [self.python, str(DRIVER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={"PATH": "/usr/bin:/bin", "MARK": "the-launcher's-secret", "PYTHONDONTWRITEBYTECODE": "1"},
            **self.identity,
        )
        assert process.stdin is not None
        process.stdin.write(self.order(list(sessions)))
        process.stdin.close()
        process.stdin = None
        return process

    def run(self, *sessions: Session) -> list[Result]:
        process = self.start(*sessions)
        try:
            out, self.errors = process.communicate(timeout=300)
        finally:
            process.kill()
        assert process.returncode == 0, self.errors
        return [Result(**{"alive_after": None, **entry}) for entry in json.loads(out)]

    def one(self, code: str, **spec: Any) -> Any:
        """What one session said; it must have ended well."""
        [result] = self.run(Session(code, spec=spec))
        assert result.status == 0, f"status {result.status}: {self.errors}"
        return result.reported


_SYSTEM = [Path(p) for p in ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc")]


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder of sessions that an ordinary user can reach, which pytest's own are not."""
    path = Path(tempfile.mkdtemp(prefix="isolation-test-"))
    sessions = path / "sessions"
    sessions.mkdir()
    path.chmod(0o755)
    sessions.chmod(0o755)
    if os.geteuid() == 0:
        os.chown(sessions, NOBODY, NOBODY)
    yield sessions
    shutil.rmtree(path, ignore_errors=True)


def _users() -> list[str]:
    return ["root", "ordinary"] if os.geteuid() == 0 else ["ordinary"]


@pytest.fixture(params=_users())
def user(request: pytest.FixtureRequest) -> str:
    if request.param == "ordinary" and os.geteuid() == 0 and not os.access(SYSTEM_PYTHON, os.X_OK):
        pytest.skip("no interpreter that another user can run")
    return str(request.param)


@pytest.fixture(params=["namespaces", "landlock", "process"])
def launcher(request: pytest.FixtureRequest, user: str, folder: Path) -> Launcher:
    return make_launcher(request.param, user, folder)


@pytest.fixture
def namespaces(user: str, folder: Path) -> Launcher:
    return make_launcher("namespaces", user, folder)


@pytest.fixture
def landlock(user: str, folder: Path) -> Launcher:
    return make_launcher("landlock", user, folder)


@pytest.fixture
def process(user: str, folder: Path) -> Launcher:
    return make_launcher("process", user, folder)


def make_launcher(tier: str, user: str, folder: Path) -> Launcher:
    launcher = Launcher(tier, user, folder)
    if tier != "process":
        why = unavailable(tier, launcher)
        if why:
            pytest.skip(f"{tier} as {user}: {why}")
    return launcher


def unavailable(tier: str, launcher: Launcher) -> str:
    """Why the tier cannot be used by that user here; empty when it can."""
    return str(asked(launcher, f"TIERS[{tier!r}].describe().unavailable or ''"))


_answers: dict[tuple[str, str], Any] = {}


def asked(launcher: Launcher, expression: str) -> Any:
    """The value of an expression over TIERS, in a process of the launcher's user."""
    key = (launcher.user, expression)
    if key not in _answers:
        code = (
            f"import json, sys; sys.path.insert(0, {str(ROOT / 'isolation')!r})\n"
            f"import boot; del sys.path[0]; TIERS = boot.load('isolation.tiers').TIERS; print(json.dumps({expression}))"
        )
        command = [launcher.python, "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd="/", **launcher.identity)
        assert done.returncode == 0, done.stderr
        _answers[key] = json.loads(done.stdout)
    return _answers[key]
