"""The README and the guides as a reader follows them, with the pages' own commands."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```(?:bash|python)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LIMIT_S = 280  # for a block, on a busy machine
TRAIN, SHORT = "agentcore-rl train ", "--steps 1 --groups 2 --rollouts 2 "  # a page's training, shortened
pytestmark = pytest.mark.timeout(600)


class Reader:
    """A person with a page, an empty folder and a shell."""

    def __init__(self, page: str, folder: Path) -> None:
        self.blocks = BLOCK.findall((ROOT / page).read_text())
        self.folder = folder
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "AGENTCORE_"))}
        self.environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"

    def block(self, text: str) -> str:
        """The first block that contains these words."""
        return next(block for block in self.blocks if text in block)

    def run(self, block: str, *, limit_s: float = LIMIT_S) -> str:
        command = ["bash", "-euc", block.replace(TRAIN, TRAIN + SHORT)]
        ran = subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=limit_s
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return ran.stdout

    def as_a_stranger(self) -> None:
        """No environment of Python's on the path, none active, nothing of git's or pytest's own."""
        hidden = ("VIRTUAL_ENV", "PYTHON", "PYTEST_", "GIT_", "COLUMNS", "MAKE")
        self.environment = {k: v for k, v in self.environment.items() if not k.startswith(hidden)}
        own = Path(sys.executable).parent
        places = [place for place in self.environment["PATH"].split(":") if Path(place) != own]
        self.environment["PATH"] = ":".join(places)


@pytest.fixture
def started() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def keep_rows(file: Path, count: int) -> None:
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:count]))


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_an_agent_of_ones_own_is_made_run_trained_and_measured(tmp_path: Path, started: ExitStack) -> None:
    reader = Reader("docs/your-agent.md", tmp_path)
    reader.run(reader.block("agentcore-rl init"))
    assert " passed" in reader.run(reader.block("python -m pytest"))
    keep_rows(tmp_path / "shop" / "eval.jsonl", 4)
    command = shlex.split(reader.block("agentcore-rl up"))
    stack = started.enter_context(
        subprocess.Popen(command, cwd=tmp_path, env=reader.environment, stdout=subprocess.PIPE, text=True)
    )
    started.callback(stack.terminate)
    assert stack.stdout is not None
    assert any("Ctrl-C stops everything" in line for line in stack.stdout)
    reply = reader.run(reader.block("agentcore-rl invoke"))
    assert re.match(r"outcome ok   reward [01]   \d+ turns, \d+ tokens\n", reply)
    assert "on the services of `agentcore-rl up`" in reader.run(reader.block("agentcore-rl train"))
    [run] = (tmp_path / "runs").iterdir()
    assert reader.run(reader.block("agentcore-rl runs show --worst")).count("#") == 3
    assert (tmp_path / "run.html").read_text().startswith("<!")
    with_model = re.sub(r"runs/shop-\d+-\d+", f"runs/{run.name}", reader.block("--model runs/shop"))
    assert "an empty reply solves 0 of 32 rows" in reader.run(reader.block("--check"))
    for measure in (reader.block("eval --agent shop/agent.py --data shop/eval.jsonl"), with_model):
        assert re.match(r"reward [\d.]+  \(95 % interval", reader.run(measure))
    stack.send_signal(signal.SIGINT)
    assert stack.wait(60) == 130


@pytest.mark.nightly  # installs everything anew
@pytest.mark.timeout(2400)
def test_the_readme_leads_from_a_clone_to_a_trained_agent(tmp_path: Path, started: ExitStack) -> None:
    """The page's lines in an empty folder. Of `make quickstart` the first step, then Ctrl-C."""
    reader = Reader("README.md", tmp_path)
    reader.as_a_stranger()
    clone, quickstart = reader.block("git clone").splitlines()
    reader.run(clone.replace(" URL ", f" {shlex.quote(str(ROOT))} "))
    reader.folder = tmp_path / "agentcore-rl"
    running = started.enter_context(
        subprocess.Popen(
            ["bash", "-c", quickstart],
            cwd=reader.folder,
            env=reader.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # Ctrl-C goes to all that a terminal runs
        )
    )
    assert running.stdout is not None
    lines = []
    for line in running.stdout:
        lines.append(line)
        if line.startswith("step 1 "):
            os.killpg(running.pid, signal.SIGINT)
    assert running.wait(60) != 0
    [go_on] = [line.strip() for line in lines if "--resume" in line] or ["".join(lines)]
    assert go_on.startswith(".venv/bin/agentcore-rl quickstart --resume --out runs/quickstart-"), go_on
    activate = reader.block(". .venv/bin/activate").splitlines()[0]
    make, invoke, train, *_ = reader.block("agentcore-rl init").splitlines()
    reader.run(f"{activate}\n{make}")
    keep_rows(reader.folder / "shop" / "eval.jsonl", 4)
    assert reader.run(f"{activate}\n{invoke}").startswith("outcome ok")
    assert "Finished in" in reader.run(f"{activate}\n{train.replace(' --model MODEL', '')}")  # as the page suggests
    assert (reader.folder / "runs" / "shop" / "policy").is_dir()


@pytest.mark.nightly  # installs everything anew
@pytest.mark.timeout(2400)
def test_the_readme_installs_into_an_environment_of_ones_own(tmp_path: Path) -> None:
    reader = Reader("README.md", tmp_path)
    reader.as_a_stranger()
    reader.run(f"git clone -q {shlex.quote(str(ROOT))} clone && python3 -m venv own")
    reader.folder = tmp_path / "clone"
    reader.environment["PATH"] = f"{tmp_path / 'own' / 'bin'}:{reader.environment['PATH']}"
    reader.environment["PIP_CONSTRAINT"] = str(ROOT / "constraints.txt")
    for line in reader.block("pip install -e .").splitlines():
        reader.run(line, limit_s=1200)
        assert reader.run("agentcore-rl version").strip()
    assert list((tmp_path / "clone" / "dist").glob("agentcore_rl_toolkit-*.whl"))
    assert "none failed" in reader.run("agentcore-rl doctor")


def test_the_readme_names_targets_and_extras_that_there_are() -> None:
    page = (ROOT / "README.md").read_text()
    targets = set(re.findall(r"\bmake ([a-z-]+)", page))
    assert {"quickstart", "wheel"} <= targets
    for target in targets:
        tried = ["make", "-n", target]
        assert subprocess.run(tried, cwd=ROOT, capture_output=True, timeout=300).returncode == 0, target
    there = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(re.findall(r"\.(?:whl)?\[([a-z]+)\]'", page)) <= set(there)


@pytest.mark.system
def test_the_notebook_runs_from_its_first_to_its_last_cell(tmp_path: Path) -> None:
    cells = json.loads((ROOT / "examples" / "notebooks" / "first_run.ipynb").read_text())["cells"]
    program = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-W", "ignore", "-c", program]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert re.search("^step 2 ", ran.stdout, re.MULTILINE)
    assert "«" in ran.stdout.rpartition("sequence 1:")[2]


BASH = re.compile(r"^```bash\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SERVERS = {
    "agentcore-rl up ": "Ctrl-C stops everything",
    "agentcore-rl serve ": "Ctrl-C ends it",
    "agentcore-rl view": "http",
}
# A block with one of these needs an account, a server of the reader's, or the package index that this machine has already.
NOT_HERE = re.compile(
    r"\b(?:ARN|BUCKET|HOST|ID|MODEL|my-records|my-models|eval-old|eval-hosted|Qwen3-4B|vllm)\b|--aws|PIP_EXTRA_INDEX_URL|--judge"
)


class Follower(Reader):
    """A reader who pastes each block of a page. A server runs until the next one starts or the page ends."""

    server: subprocess.Popen[str] | None = None

    def follow(self, page: str) -> list[str]:
        """Paste the blocks of a page and return them, without those that cannot run here."""
        blocks = [block for block in BASH.findall((ROOT / page).read_text()) if not NOT_HERE.search(block)]
        try:
            for block in blocks:
                text = re.sub(r"runs/(shop|quickstart)-\d{8}-\d{6}", self.first_run, block.replace("\\\n", ""))
                before: list[str] = []
                for line in text.splitlines(keepends=True):
                    ready = next(
                        (r for start, r in SERVERS.items() if line.startswith(start) and "--export" not in line), None
                    )
                    if ready is None:
                        before.append(line)
                    else:
                        self.serve("".join([*before, f"exec {line}"]), ready)
                        before = [kept for kept in before if kept.startswith("export ")]
                if "".join(before).strip():
                    self.paste("".join(before))
        finally:
            self.stop()
        return blocks

    def first_run(self, named: re.Match[str]) -> str:
        """The run that the reader has in place of the page's."""
        return f"runs/{min(run.name for run in (self.folder / 'runs').glob(f'{named[1]}-*'))}"

    def paste(self, text: str) -> None:
        ran = subprocess.run(
            ["bash", "-euc", text], cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=3000
        )
        assert ran.returncode == 0, f"{text}\n{ran.stdout}{ran.stderr}"

    def serve(self, text: str, ready: str) -> None:
        self.stop()
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        self.server = subprocess.Popen(
            ["bash", "-euc", text],
            cwd=self.folder,
            env=self.environment,
            text=True,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(
                signal.SIGINT, signal.SIG_DFL
            ),  # ignored if the tests run in the background
            **pipes,
        )
        assert self.server.stdout is not None
        lines: list[str] = []
        for line in self.server.stdout:
            lines.append(line)
            if ready in line:
                return
        raise AssertionError(f"{text}\n{''.join(lines)}")

    def stop(self) -> None:
        if self.server is not None:
            os.killpg(self.server.pid, signal.SIGINT)
            assert self.server.wait(60) in (0, 130)
            self.server.stdout.close()
            self.server = None


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_the_quickstart_runs_word_for_word_and_its_model_is_served_and_compared(tmp_path: Path) -> None:
    reader = Follower("docs/quickstart.md", tmp_path)
    reader.as_a_stranger()
    reader.paste(f"git clone -q {shlex.quote(str(ROOT))} clone")
    reader.folder = tmp_path / "clone"
    reader.environment["PATH"] = f"{reader.folder / '.venv' / 'bin'}:{reader.environment['PATH']}"
    assert len(reader.follow("docs/quickstart.md")) == 3
    assert len(reader.follow("docs/production.md")) == 3


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_your_own_agent_runs_word_for_word(tmp_path: Path) -> None:
    reader = Follower("docs/your-agent.md", tmp_path)
    assert len(reader.follow("docs/your-agent.md")) >= 9


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_bring_your_own_project_runs_word_for_word(tmp_path: Path) -> None:
    reader = Follower("docs/own-project.md", tmp_path)
    reader.paste("agentcore-rl init agents --framework plain && cp -r agents/. . && mkdir src && cp -r agents src/shop")
    assert len(reader.follow("docs/own-project.md")) == 2
