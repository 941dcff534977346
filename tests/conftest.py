"""What tests of all folders share: environments with other packages, made once under `.venvs/`, ports, and a browser."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import gc
import hashlib
import importlib.util
import json
import logging
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import httpx
import hypothesis
import pytest
from botocore.httpsession import URLLib3Session
from botocore.loaders import JSONFileLoader

from agentcore_rl_toolkit.contract import Outcome
from agentcore_rl_toolkit.runs import RunReader, TokenSequence

# `make nightly`: more of what takes examples or repetitions, and the tests marked for it.
NIGHTLY = bool(os.environ.get("AGENTCORE_RL_NIGHTLY"))
MORE = 20  # times the examples of every property at night

# A deadline for each example would measure the load of the machine.
hypothesis.settings.register_profile("project", max_examples=25, deadline=None)
hypothesis.settings.load_profile("project")

# Started in the background by a script, this process and all that it starts would ignore the Ctrl-C that some tests send.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Every core has a process of tests: threads of torch would only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Options of this run are no options of the runs of pytest that tests start.
os.environ.pop("PYTEST_ADDOPTS", None)

ROOT = Path(__file__).parents[1]


@functools.cache
def tls_context(verify: Any, cert: Any, trust_env: bool, *environment: str | None) -> Any:
    return httpx.create_ssl_context(verify, cert, trust_env)


def shared_tls_context(verify: Any = True, cert: Any = None, trust_env: bool = True) -> Any:
    """Each client makes a TLS context, which takes 30 ms of CPU. All clients of the tests share one."""
    return tls_context(verify, cert, trust_env, *map(os.environ.get, ("SSL_CERT_FILE", "SSL_CERT_DIR")))


httpx._transports.default.create_ssl_context = shared_tls_context  # type: ignore[attr-defined]


def pytest_collection() -> None:
    gc.disable()  # imports make few cycles and many objects


def pytest_collection_finish() -> None:
    gc.enable()
    gc.collect()
    gc.freeze()  # later collections look at the objects of the tests only


@pytest.fixture(autouse=True)
def _log_level_of_a_new_process() -> None:
    """An app that an earlier test made in this process has set it."""
    logging.getLogger("agentcore_rl_toolkit").setLevel(logging.NOTSET)


@pytest.fixture(autouse=True)
def _credentials_as_they_were() -> Iterator[None]:
    """Commands that are run in this process give it the local stack's credentials, which win over those of a file."""
    before = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    yield
    for name in [name for name in os.environ if name.startswith("AWS_") and name not in before]:
        del os.environ[name]
    os.environ.update(before)
    if (boto3 := sys.modules.get("boto3")) is not None:
        boto3.DEFAULT_SESSION = None  # type: ignore[attr-defined]  # it keeps the credentials that it found first


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """A port of the loopback for a process that must be told one; nobody else is given it until the block ends.

    The socket that holds it does not listen, so a server that sets SO_REUSEADDR (asyncio's do) may bind beside it, while the
    kernel no longer picks the port for others. A port that was only looked up is at times somebody else's a moment later.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield int(holder.getsockname()[1])


CommandLine = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def command_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    """`agentcore-rl` with these words, in this process: a process of its own would be a second of CPU of imports."""

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        from agentcore_rl_toolkit.cli.main import main

        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", ["agentcore-rl", *words])
            patch.setattr(sys, "excepthook", sys.excepthook)  # a command line sets its own
            patch.setattr(threading, "excepthook", threading.excepthook)
            with pytest.raises(SystemExit) as ended:
                main()
        printed = capsys.readouterr()
        return subprocess.CompletedProcess(words, int(ended.value.code or 0), printed.out, printed.err)

    return run


class MakeEnvironment(Protocol):
    """Python of a virtual environment with these requirements, made on first use and kept for those who ask for the same.

    ``upon_this`` lets it see what this environment has, so that only what is missing is installed. Options of pip may
    stand among the requirements; ``then`` is installed in a second step. Skips the test, saying why, where no such
    environment can be made: without a package index, or with AGENTCORE_RL_NO_INSTALL set.
    Units: ``limit_s`` seconds for each step.
    """

    def __call__(
        self, name: str, *wanted: str, then: Sequence[str] = (), upon_this: bool = False, limit_s: float = 240.0
    ) -> str: ...


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests first: with whole files handed to workers, one that begins last would keep the others waiting."""
    at_night = pytest.mark.skip(reason="make nightly runs it")
    for item in items:
        if not NIGHTLY and item.get_closest_marker("nightly") is not None:
            item.add_marker(at_night)
        if NIGHTLY and hypothesis.is_hypothesis_test(test := getattr(item, "function", None)):
            _more_examples(test)
    slow = {item.path for item in items if item.get_closest_marker("slow") is not None}
    items.sort(key=lambda item: item.path not in slow)


def _more_examples(test: Any) -> None:
    usual = test._hypothesis_internal_use_settings  # where hypothesis keeps what its decorator was given
    if usual.max_examples < 5 * MORE:  # once for a function with many parameters
        test._hypothesis_internal_use_settings = hypothesis.settings(usual, max_examples=usual.max_examples * MORE)


# Files that one worker gets, one after the other, because they share what is costly to make.
ONE_AFTER_THE_OTHER = {
    "tests/runtime/containers/test_node.py": "containers",  # one engine and one image for both
    "tests/runtime/containers/test_host_files.py": "containers",
    "tests/deploy/test_image.py": "containers",
}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """With ``--dist loadfile`` a worker gets a whole file at a time, or the files that belong together."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return ONE_AFTER_THE_OTHER.get(file, file)

    return ByFile(config, log)


_aws_connections: list[URLLib3Session] = []  # of this test: held, so that none is left to the collector
_aws_connections_before: weakref.WeakSet[URLLib3Session] = weakref.WeakSet()
_aws_streams: list[
    Any
] = []  # replies of this test that are read as they come: one that is not read to its end keeps its socket


def _remember_aws_connections() -> None:
    """boto3's clients keep connections that only `close` ends, and few who write a test think of it."""
    make = URLLib3Session.__init__

    @functools.wraps(make)
    def remember(self: URLLib3Session, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        _aws_connections.append(self)

    send = URLLib3Session.send

    @functools.wraps(send)
    def remember_stream(self: URLLib3Session, request: Any) -> Any:
        response = send(self, request)
        if request.stream_output:
            _aws_streams.append(response.raw)
        return response

    URLLib3Session.__init__ = remember
    URLLib3Session.send = remember_stream


_remember_aws_connections()


def _close_aws_connections() -> None:
    """Idle ones, and those of replies that broke off. A client that lives on makes new ones when it is used again."""
    for stream in _aws_streams:
        stream.close()
    _aws_streams.clear()
    for session in [*_aws_connections, *_aws_connections_before]:
        session.close()
    _aws_connections_before.update(_aws_connections)
    _aws_connections.clear()


def _read_aws_models_once() -> None:
    """Each session of boto3 reads a megabyte of JSON about regions and its service anew; the suite makes hundreds of sessions."""
    read = JSONFileLoader.load_file
    known: dict[str, Any] = {}

    def load_file(self: JSONFileLoader, file_path: str) -> Any:
        if file_path not in known:
            known[file_path] = read(self, file_path)
        return known[file_path]

    JSONFileLoader.load_file = load_file


_read_aws_models_once()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cpu", action="store_true", help="print the CPU seconds of each file, with the processes it started"
    )


_cpu_s_of_files: Counter[str] = Counter()
_before = pytest.StashKey[float]()


def _cpu_s() -> float:
    """Of this process and of all that it started and waited for, and they in turn."""
    return sum(
        u.ru_utime + u.ru_stime for u in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, None, None]:
    item.stash[_before] = _cpu_s()
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, None, None]:
    try:
        return (yield)
    finally:
        _close_aws_connections()
        item.user_properties.append(("cpu_s", _cpu_s() - item.stash[_before]))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "teardown":
        file = report.nodeid.partition("::")[0]
        _cpu_s_of_files[file] += sum(float(str(value)) for name, value in report.user_properties if name == "cpu_s")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """What the tests said that passed at another try, without which nobody could find out why; with ``--cpu`` what they cost."""
    if config.getoption("cpu"):
        terminalreporter.section(f"{_cpu_s_of_files.total():.0f} CPU seconds")
        for file, spent_s in _cpu_s_of_files.most_common(40):
            terminalreporter.write_line(f"{spent_s:8.1f}  {file}")
    for report in terminalreporter.stats.get("rerun", []):
        terminalreporter.section(f"first try of {report.nodeid}", sep="-")
        terminalreporter.write_line(str(report.longrepr)[-3000:])


@pytest.fixture(scope="session")
def make_environment() -> MakeEnvironment:
    return _make


# Modules of TRL's environment, and what brings them.
TRACKERS = {"tensorboard": "tensorboard>=2.18", "wandb": "wandb>=0.19", "mlflow": "mlflow-skinny>=2.20"}


@pytest.fixture(scope="session")
def trl_python(make_environment: MakeEnvironment) -> str:
    """Path of a Python that can import TRL, trackers and this package: this one if it can, else one on top of it."""
    if all(importlib.util.find_spec(name) for name in ("trl", "peft", *TRACKERS)):
        return sys.executable
    wanted = ("trl>=1.16,<2", "peft>=0.15", *TRACKERS.values())
    return make_environment("trl-test", "-c", str(ROOT / "constraints.txt"), *wanted, upon_this=True)


def _make(name: str, *wanted: str, then: Sequence[str] = (), upon_this: bool = False, limit_s: float = 240.0) -> str:
    ours = sysconfig.get_paths()["purelib"]
    steps = [list(wanted), *([list(then)] if then else [])]
    stamp = f"{sys.version.split()[0]} {ours if upon_this else ''} {steps}"
    # By what is in it: of two that ask for the same name and other packages, one would remove what the other runs.
    home = ROOT / ".venvs" / f"{name}-{hashlib.sha256(stamp.encode()).hexdigest()[:8]}"
    home.parent.mkdir(exist_ok=True)
    with open(f"{home}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        ready = home / "ready"
        if not ready.exists():
            if os.environ.get("AGENTCORE_RL_NO_INSTALL"):
                pytest.skip("AGENTCORE_RL_NO_INSTALL is set")
            trouble = _build(home, steps, ours if upon_this else None, limit_s)
            if trouble:
                pytest.skip(f"no environment with {steps} could be made: {trouble}")
            ready.write_text(f"{stamp}\n")
    return str(home / "bin" / "python")


def _build(home: Path, steps: list[list[str]], below: str | None, limit_s: float) -> str | None:
    """Make the environment, on top of `below` if that is given. What went wrong, if anything did."""
    uv, python = [sys.executable, "-m", "uv"], str(home / "bin" / "python")

    def install(into: str, *wanted: str) -> str:
        return _said([*uv, "pip", "install", "--color", "never", "--python", into, *wanted], limit_s)

    try:
        _said([*uv, "venv", "-q", "--clear", "-p", sys.executable, str(home)], limit_s)
        if below is not None:
            site = next((home / "lib").glob("python*/site-packages"))
            (site / "base.pth").write_text(f"import site; site.addsitedir({below!r})\n")
        for step in steps:
            if below is not None:  # uv does not see what lies below: what is missing is asked for there
                found = install(sys.executable, "--dry-run", *step).splitlines()
                step = ["--no-deps", *(line.split()[1] for line in found if line.startswith(" + "))]
            if step != ["--no-deps"]:
                install(python, *step)
    except subprocess.TimeoutExpired as e:
        return f"{' '.join(e.cmd[1:4])} took longer than {limit_s:g} s"
    except subprocess.CalledProcessError as e:
        return str(e.stderr)[-400:]
    return None


def _said(command: list[str], limit_s: float) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=True).stderr


# -- the view in a browser

CHROMIUM = shutil.which("chromium")
CHROMIUM_FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium, by Playwright. Skips the test where either is missing."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("no chromium (make packages)")
    with playwright.sync_playwright() as driver:
        made = driver.chromium.launch(executable_path=CHROMIUM, args=list(CHROMIUM_FLAGS))
        yield made
        made.close()


@pytest.fixture
def is_what_the_docs_say() -> Callable[[Path, str], None]:
    """Holds a run's folder against what all writers have in common, and against its row of the table in docs/view.md."""

    def compare(run: Path, writer: str) -> None:
        table = (ROOT / "docs/view.md").read_text().partition("| trainer or command |")[2]
        [line] = [row for row in table.splitlines() if re.match(rf"\|[^|]*\b{re.escape(writer)}\b", row)]
        *_, advantage, logprobs, entropy = (cell.strip() for cell in line.strip("|").split("|"))
        config = json.loads((run / "config.json").read_text())
        assert config
        assert not [name for name in config if name.endswith("_key")]
        events = [json.loads(event) for event in (run / "metrics.jsonl").read_text().splitlines()]
        assert {"step", "evaluated"} & {event["event"] for event in events}
        compared = 0
        with RunReader(run) as reader:
            for row in reader.rollouts(limit=reader.count()):
                assert row["outcome"] in set(Outcome)
                whole = reader.rollout(row["id"])
                assert whole is not None
                assert whole["detail"]["stages"]
                sequences = [TokenSequence.decoded(sequence) for sequence in whole["sequences"] or ()]
                theirs = any(sequence.trainer_logprobs is not None for sequence in sequences)
                known = (row["advantage"] is not None, theirs, row["entropy_mean"] is not None)
                handed_over = row["phase"] == "train" and row["step"] is not None
                if row["mask_reason"] is not None or not handed_over:
                    assert known == (False, False, False)  # absent is not zero
                    continue
                compared += 1
                for sequence in sequences:
                    assert len(sequence.ids) == len(sequence.mask) == len(sequence.logprobs or ())
                    assert [lp is not None for lp in sequence.logprobs or ()] == [m == 1 for m in sequence.mask]
                answer = (
                    advantage,
                    *((logprobs, entropy) if row["advantage"] else ()),
                )  # one of 0 is not trained everywhere
                for cell, there in zip(answer, known, strict=False):
                    assert cell not in ("yes", "no") or there == (cell == "yes"), (writer, row["id"], known)
        assert compared or advantage == "none"

    return compare
