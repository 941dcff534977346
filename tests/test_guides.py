"""The README and the guides as a reader follows them: the pages' own blocks, with free ports in place of the pages'."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
BLOCK = re.compile(
    r"<!-- run by: tests/test_guides\.py::\w+ -->\n```\w+\n(?P<text>.*?)```\n(?:\n```text\n(?P<shown>.*?)```)?", re.S
)
LIMIT_S = 280  # for a block, on a busy machine
pytestmark = pytest.mark.timeout(600)


class Reader:
    """Somebody with a page, an empty folder and a shell for each server."""

    def __init__(self, page: str, folder: Path, servers: ExitStack) -> None:
        self.blocks = [(found["text"], found["shown"] or "") for found in BLOCK.finditer((DOCS / page).read_text())]
        self.folder = folder
        self.servers = servers
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "AGENTCORE_"))}
        self.environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.as_printed: dict[str, str] = {}  # what the page has -> what is so here

    def own(self, text: str) -> str:
        for of_the_page, own in self.as_printed.items():
            text = text.replace(of_the_page, own)
        return text

    def serve(self, block: str, *, lines: int = 1) -> list[str]:
        """Starts it on a free port; returns the first lines that it prints."""
        port = re.search(r"--port (\d+)", block)
        assert port is not None, block
        words = self.own(block).replace(port[0], "--port 0").split()
        server = self.servers.enter_context(
            subprocess.Popen(
                [*words, "--parent-pid", str(os.getpid())],
                cwd=self.folder,
                env=self.environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
        self.servers.callback(server.terminate)
        assert server.stdout is not None
        printed = [server.stdout.readline() for _ in range(lines)]
        found = re.search(r"http://127\.0\.0\.1:\d+", printed[0])
        assert found, printed
        self.as_printed[f"http://127.0.0.1:{port[1]}"] = found[0]
        return printed

    def run(self, block: str, *, program: str = "bash", limit_s: float = LIMIT_S) -> str:
        command = [sys.executable, "-c"] if program == "python" else ["bash", "-euc"]
        ran = subprocess.run(
            [*command, self.own(block)],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=limit_s,
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return ran.stdout


@pytest.fixture
def servers() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_the_gateway_guide_works_as_it_stands(tmp_path: Path, servers: ExitStack) -> None:
    reader = Reader("gateway.md", tmp_path, servers)
    (policy, _), (gateway, first_lines), (connect, shown), (export, _) = reader.blocks
    reader.serve(policy)
    [first] = reader.serve(gateway)
    assert reader.own(first_lines).startswith(first)
    printed = reader.run(connect, program="python")
    shape = re.compile(r"2 turns, \d+ sampled tokens\n(\d+ tokens, \d+ of them to train on\n)+")
    assert shape.fullmatch(printed)
    assert shape.fullmatch(shown)
    servers.close()  # the store is read when nobody serves it
    reader.run(export)
    rows = [json.loads(line) for line in (tmp_path / "turns.jsonl").read_text().splitlines()]
    assert [row["index"] for row in rows] == [0, 1]
    assert all(len(row["completion_ids"]) == len(row["logprobs"]) for row in rows)


def test_the_runtime_guide_works_as_it_stands(tmp_path: Path, servers: ExitStack) -> None:
    reader = Reader("runtime.md", tmp_path, servers)
    (agent, _), (serve, first_lines), (exports, _), (call, answer), (ps, table) = reader.blocks
    (tmp_path / "hello.py").write_text(agent)
    printed = reader.serve(serve, lines=4)
    [arn], [of_the_page] = (re.findall(r"arn:\S+", text) for text in (printed[-1], first_lines))
    reader.as_printed[of_the_page] = arn
    without_tier = re.compile(r"isolation: \w+")
    assert without_tier.sub("", reader.own(first_lines)) == without_tier.sub("", "".join(printed))
    reader.environment |= dict(re.findall(r"(AWS_\w+)=(\S+)", reader.own(exports)))
    assert reader.run(call, program="python") == answer
    url = reader.environment["AWS_ENDPOINT_URL_BEDROCK_AGENTCORE"]
    [head, row] = reader.run(f"{ps.strip()} --url {url}").splitlines()  # other runtimes may run on this machine
    assert head.split() == table.splitlines()[0].split()
    assert row.split()[1:3] == table.splitlines()[1].split()[1:3] == ["hello:1", "idle"]


# A training as the page has it, shortened by settings that its options would win over.
SHORT = {"AGENTCORE_RL_TRAIN_STEPS": "1", "AGENTCORE_RL_TRAIN_GROUPS": "2", "AGENTCORE_RL_TRAIN_ROLLOUTS": "2"}


def keep_rows(file: Path, count: int) -> None:
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:count]))


EVALUATED = re.compile(r"reward [\d.]+  \(95 % interval")


@pytest.mark.slow
def test_an_agent_of_ones_own_is_made_and_measured_where_nothing_runs(tmp_path: Path, servers: ExitStack) -> None:
    reader = Reader("your-agent.md", tmp_path, servers)
    make, check, measure = (reader.blocks[at][0] for at in (0, 1, 6))
    reader.run(make)
    assert " passed" in reader.run(check)
    keep_rows(tmp_path / "shop" / "eval.jsonl", 4)
    assert EVALUATED.match(reader.run(measure))


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_an_agent_of_ones_own_is_made_run_trained_and_measured_as_the_guide_says(
    tmp_path: Path, servers: ExitStack
) -> None:
    reader = Reader("your-agent.md", tmp_path, servers)
    reader.environment |= SHORT
    (make, _), (check, _), (invoke, shown), (up, _), (train, _), (look, _), (measure, _), (trained, _) = reader.blocks
    reader.run(make)
    assert " passed" in reader.run(check)
    keep_rows(tmp_path / "shop" / "eval.jsonl", 4)
    stack = servers.enter_context(
        subprocess.Popen(shlex.split(up), cwd=tmp_path, env=reader.environment, stdout=subprocess.PIPE, text=True)
    )
    servers.callback(stack.terminate)
    assert stack.stdout is not None
    assert any("Ctrl-C stops everything" in line for line in stack.stdout)
    reply = reader.run(invoke)
    assert re.match(r"outcome ok   reward [01]   \d+ turns, \d+ tokens\n", reply)
    assert reply.splitlines()[1:3] == shown.splitlines()[1:3]  # what it was told and asked
    [of_the_page] = set(re.findall(r"runs/shop-\d+-\d+", (DOCS / "your-agent.md").read_text()))
    out = reader.run(train)
    assert out.startswith("Training shop  run directory")
    assert "on the services of `agentcore-rl up`" in out
    assert [line.split("  ")[0] for line in out.splitlines() if re.match(r"held out|step \d", line)] == [
        "held out, before",
        "step 1",
        "held out, after",
    ]
    [run] = (tmp_path / "runs").iterdir()
    reader.as_printed[of_the_page] = f"runs/{run.name}"
    assert reader.run(look).count("#") == 3
    assert (tmp_path / "run.html").read_text().startswith("<!")
    assert EVALUATED.match(reader.run(measure))
    assert EVALUATED.match(reader.run(trained))  # with services of its own
    stack.send_signal(signal.SIGINT)
    assert stack.wait(60) == 130


@pytest.mark.nightly  # installs everything anew
@pytest.mark.timeout(2400)
def test_the_readme_leads_from_a_clone_to_a_trained_agent(tmp_path: Path, servers: ExitStack) -> None:
    """As somebody who has the page alone: its lines in an empty folder, in a shell that knows no environment.

    Of `make quickstart` the first steps, and Ctrl-C. `make test` is what this test is part of.
    """
    reader = Reader("../README.md", tmp_path, servers)
    strangers_shell(reader)
    (first,) = (text for text, _ in reader.blocks if text.startswith("git clone"))
    (own,) = (text for text, _ in reader.blocks if "agentcore-rl init" in text)
    clone, quickstart, test = first.splitlines()
    reader.as_printed["ADDRESS_OF_THIS_REPOSITORY"] = shlex.quote(str(DOCS.parent))
    reader.run(clone)
    reader.folder = tmp_path / "agentcore-rl"
    assert test.split()[:2] == ["make", "test"]
    running = servers.enter_context(
        subprocess.Popen(
            ["bash", "-c", reader.own(quickstart)],
            cwd=reader.folder,
            env=reader.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # Ctrl-C goes to all that a terminal runs
        )
    )
    assert running.stdout is not None
    entries = []
    for line in running.stdout:
        entries.append(line)
        if line.startswith("step 1 "):
            os.killpg(running.pid, signal.SIGINT)
    assert running.wait(60) != 0
    [go_on] = [line.strip() for line in entries if "--resume" in line] or ["".join(entries)]
    assert go_on.startswith(".venv/bin/agentcore-rl quickstart --resume --out runs/quickstart-"), go_on
    [activate, make, train] = own.splitlines()
    reader.environment |= SHORT
    reader.run(f"{activate}\n{make}")
    keep_rows(reader.folder / "shop" / "eval.jsonl", 4)
    reader.run(f"{activate}\npython -m pytest shop")  # as `init` says
    assert "Finished in" in reader.run(f"{activate}\n{train}")


@pytest.mark.nightly  # installs everything anew
@pytest.mark.timeout(2400)
def test_the_readme_installs_into_an_environment_of_ones_own(tmp_path: Path, servers: ExitStack) -> None:
    reader = Reader("../README.md", tmp_path, servers)
    strangers_shell(reader)
    reader.run(f"git clone -q {shlex.quote(str(DOCS.parent))} clone && python3 -m venv own")
    reader.folder = tmp_path / "clone"
    reader.environment["PATH"] = f"{tmp_path / 'own' / 'bin'}:{reader.environment['PATH']}"
    reader.environment["PIP_CONSTRAINT"] = str(DOCS.parent / "constraints.txt")
    [block] = [text for text, _ in reader.blocks if text.startswith("pip install -e .")]
    for line in block.splitlines():
        reader.run(line, limit_s=1200)
        assert reader.run("agentcore-rl version").strip()
    assert list((tmp_path / "clone" / "dist").glob("agentcore_rl_toolkit-*.whl"))
    assert "none failed" in reader.run("agentcore-rl doctor")


def strangers_shell(reader: Reader) -> None:
    """No environment of Python's on its path, none active, nothing of git's or pytest's own."""
    hidden = ("VIRTUAL_ENV", "PYTHON", "PYTEST_", "GIT_", "COLUMNS", "MAKE")
    reader.environment = {k: v for k, v in reader.environment.items() if not k.startswith(hidden)}
    own = Path(sys.executable).parent
    places = [place for place in reader.environment["PATH"].split(":") if Path(place) != own]
    reader.environment["PATH"] = ":".join(places)


def test_the_readme_names_targets_and_extras_that_there_are() -> None:
    page = (DOCS.parent / "README.md").read_text()
    targets = set(re.findall(r"\bmake ([a-z-]+)", page))
    assert {"quickstart", "test", "wheel"} <= targets
    for target in targets:
        tried = ["make", "-n", target]
        assert subprocess.run(tried, cwd=DOCS.parent, capture_output=True, timeout=300).returncode == 0, target
    there = tomllib.loads((DOCS.parent / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(re.findall(r"\.(?:whl)?\[([a-z]+)\]'", page)) <= set(there)


@pytest.mark.nightly
def test_the_agent_of_the_readme_runs_a_rollout(tmp_path: Path, servers: ExitStack) -> None:
    """The page shows what changes; the imports and names that an agent has anyway are put in front."""
    reader = Reader("../README.md", tmp_path, servers)
    [block] = [text for text, _ in reader.blocks if "rollout_entrypoint" in text]
    has_anyway = (
        "from math_tools import SYSTEM_PROMPT, AnswerReward, calculator\nfrom strands import Agent\n"
        "from strands.models.openai import OpenAIModel\nreward = AnswerReward()\n"
        "import os\nassert os.environ['STOCK'] == 'lamps'\n"
    )
    shutil.copy(DOCS.parent / "examples" / "strands_math_agent" / "math_tools.py", tmp_path)
    (tmp_path / "agent.py").write_text(f"{has_anyway}{block}\nif __name__ == '__main__':\n    app.run()\n")
    payload = json.dumps({"prompt": "What is 2 + 3?", "answer": "5"})
    invoke = f"agentcore-rl invoke --agent agent.py --session-env STOCK=lamps {shlex.quote(payload)}"
    assert reader.run(invoke).startswith("outcome ok")
