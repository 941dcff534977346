"""Agents that know nothing of this project: evaluated, invoked and trained by their file, with a scorer beside the trainer."""

from __future__ import annotations

import functools
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentcore_rl_toolkit.cli.servers import vllm
from agentcore_rl_toolkit.cli.training import stack
from agentcore_rl_toolkit.isolation.sandbox import choose_tier
from agentcore_rl_toolkit.runs import RunReader
from serving import serving, wait_for

from ..conftest import CommandLine

EXAMPLE = Path(__file__).parents[2] / "examples" / "deployed_agent"
COMMAND = [sys.executable, "-W", "ignore", "-m", "agentcore_rl_toolkit.cli"]
pytestmark = pytest.mark.slow

# It answers with all that it can see: payload, headers, variables, files of the project and of sessions, and git's history.
SPY = """
import os, subprocess
from pathlib import Path

import httpx
from bedrock_agentcore import BedrockAgentCoreApp

app = BedrockAgentCoreApp()
HERE = Path(__file__).resolve().parent
CLIENT = httpx.Client()


@app.entrypoint
def invoke(payload, context):
    reply = CLIENT.post("http://llm.invalid:9/v1/chat/completions", json={
        "model": "gpt-9", "max_tokens": 64, "messages": [{"role": "user", "content": payload["prompt"]}]})
    reply.raise_for_status()
    Path("draft.txt").write_text(payload["prompt"])
    files = []
    for top in {HERE, Path.cwd().parent}:
        for path in sorted(top.rglob("*"), key=str):
            try:
                files.append(f"{path}: {path.read_text(errors='replace')}" if path.is_file() else str(path))
            except OSError as e:
                files.append(f"{path}: {e}")
    git = subprocess.run(["git", "-C", str(HERE), "log", "-p"], capture_output=True, text=True)
    return {"payload": payload, "headers": dict(context.request_headers or {}), "environment": dict(os.environ),
            "files": files, "git": git.stdout + git.stderr, "cmdline": Path("/proc/self/cmdline").read_text()}
"""
SCORE = """
MARK = "scorers-own-words"
print("loaded")

def score(payload, answer, reference, trajectory):
    print("called")
    assert "_reference" not in payload
    return {"reward": float(reference == "answer-key-41"), "calls": sum(m["role"] == "assistant" for m in trajectory)}
"""


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *words], cwd=folder, capture_output=True, text=True, timeout=600)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[stack.Upstream]:
    with serving(tmp_path_factory.mktemp("engine"), "policy", "serve") as info:
        yield stack.Upstream(url=info["url"], engine="policy")


@pytest.fixture
def run_here(engine: stack.Upstream, command_line: CommandLine, monkeypatch: pytest.MonkeyPatch) -> CommandLine:
    """The same in this process, with an engine that several tests share."""
    monkeypatch.setattr(stack, "start", functools.partial(stack.start, upstream=engine))

    def run_here(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
        monkeypatch.chdir(folder)
        return command_line(*words)

    return run_here


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "app.py").write_text(SPY)
    (folder / "score.py").write_text(SCORE)
    rows = [{"prompt": f"The shop in Lamp Street {n} sells 1.", "_reference": f"answer-key-4{n}"} for n in range(2)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    git = ("git", "-c", "user.name=x", "-c", "user.email=x@example.com", "-C", str(folder))
    for words in (("init", "-q"), ("add", "-A"), ("commit", "-qm", "answer-key in a message")):
        subprocess.run([*git, *words], check=True)
    subprocess.run([sys.executable, "-c", "import score"], cwd=folder, check=True, env={"PATH": "/usr/bin"})
    assert list(folder.glob("__pycache__/score.*.pyc"))
    return folder


@pytest.mark.skipif(choose_tier("auto")[0] != "process", reason="nothing is hidden without Bubblewrap")
def test_an_agent_sees_no_reference_scorer_key_or_file_of_another_session(project: Path, run_here: CommandLine) -> None:
    words = ("--agent", "app.py", "--data", "rows.jsonl", "--score", "score.py:score", "--model-host", "llm.invalid")
    # One at a time: the first session has ended when the second looks around.
    done = run_here(project, "eval", *words, "--out", "out", "--concurrency", "1", "--json")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["mean"], summary["metrics"]["calls"]) == (0.5, 1)
    assert "called" in done.stderr
    prompts = [f"The shop in Lamp Street {n} sells 1." for n in range(2)]
    for line in (project / "out" / "results.jsonl").read_text().splitlines():
        record = json.loads(line)["record"]
        assert record["_calls"] == {"gateway": 1, "elsewhere": {}}
        answer = record["_answer"]
        prompt = answer["payload"].pop("prompt")
        assert answer["payload"] == {}
        assert any(file.endswith(f"app.py: {SPY}") for file in answer["files"])
        assert any(file.endswith(f"draft.txt: {prompt}") for file in answer["files"])
        seen = json.dumps(answer)
        others = [other for other in prompts if other != prompt]
        for secret in ("answer-key", "scorers-own-words", "proof_key", '_rollout\\"', *others):
            assert secret not in seen, seen[max(0, seen.find(secret) - 500) : seen.find(secret) + 200]
        assert not re.search(r"sk-[0-9a-f]{48}", seen)  # as keys of the gateway's sessions are
    stored = list((project / "out" / "store").rglob("*.json"))
    assert len(stored) == len(prompts)
    assert all(len(path.relative_to(project / "out" / "store").parts) == 3 for path in stored)


def test_a_run_of_which_no_call_arrives_ends_with_the_argument_to_change(project: Path, run_here: CommandLine) -> None:
    source = SPY.replace("    reply.raise_for_status()\n", "").replace(
        "    reply = CLIENT", "    try:\n        reply = CLIENT"
    )
    (project / "app.py").write_text(
        source.replace(
            '"content": payload["prompt"]}]})\n',
            '"content": payload["prompt"]}]})\n    except httpx.HTTPError:\n        pass\n',
        )
    )
    words = ("--agent", "app.py", "--data", "rows.jsonl", "--score", "score.py:score")
    done = run_here(project, "eval", *words)
    assert done.returncode == 1
    first = done.stderr.partition("error: ")[2].splitlines()[0]
    assert first.startswith(
        "no model call of the agent arrived at the gateway. Calls to other addresses: 2 x llm.invalid"
    )
    assert "--model-host llm.invalid sends these calls to the gateway" in first


def test_rewards_of_rollouts_without_a_model_call_are_shown_as_such(project: Path, run_here: CommandLine) -> None:
    (project / "app.py").write_text(
        "from agentcore_rl_toolkit import AgentCoreRLApp\n\napp = AgentCoreRLApp()\n\n@app.rollout_entrypoint\n"
        "def run(payload):\n    return {'rewards': 0.0}\n\nif __name__ == '__main__':\n    app.run()\n"
    )
    done = run_here(project, "eval", "--agent", "app.py", "--data", "rows.jsonl", "--json")
    assert (done.returncode, json.loads(done.stdout)["mean"]) == (0, 0.0), done.stderr
    assert (
        "warning: 2 of 2 rollouts made no model call that arrived at the gateway, and their rewards count"
        in done.stderr
    )


def test_invoke_shows_the_failure_of_an_agent_in_plain_text(project: Path, run_here: CommandLine) -> None:
    (project / "app.py").write_text(SPY.replace("    reply = CLIENT", '    lamp = payload["lamp"]\n    reply = CLIENT'))
    done = run_here(project, "invoke", "--agent", "app.py", '{"prompt": "hi"}')
    assert done.returncode == 1
    assert "error: agent_error: KeyError: 'lamp'" in done.stderr
    assert re.search(r'File ".*app.py", line \d+, in invoke\n +lamp = ', done.stdout)
    assert "\\n" not in done.stdout
    assert "site-packages" not in done.stdout


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="/proc is of Linux")
def test_the_reference_of_an_invoked_row_leaves_the_list_of_processes(project: Path) -> None:
    words = ["invoke", "--agent", "app.py", "--score", "score.py", '{"prompt": "hi", "_reference": "known-answer"}']
    with subprocess.Popen([*COMMAND, *words], cwd=project, stderr=subprocess.DEVNULL) as process:
        shown = Path(f"/proc/{process.pid}/cmdline")
        wait_for(lambda: "known-answer" in shown.read_text(), process=process)  # exec sets it a moment later
        wait_for(lambda: "known-answer" not in shown.read_text(), process=process)
        assert process.poll() is None
        process.terminate()


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, *(pytest.param(s, marks=pytest.mark.nightly) for s in (signal.SIGINT, signal.SIGHUP))]
)
def test_ctrl_c_or_the_end_of_the_job_does_not_wait_for_the_scores_that_have_not_begun(
    project: Path, number: signal.Signals
) -> None:
    (project / "app.py").write_text(
        SPY.partition("@app.entrypoint")[0] + "@app.entrypoint\ndef invoke(payload):\n    return 1\n"
    )
    (project / "score.py").write_text("import time\n\ndef score(*_):\n    time.sleep(2)\n    return 1\n")
    (project / "rows.jsonl").write_text('{"prompt": "hi"}\n' * 20)
    words = ["eval", "--agent", "app.py", "--score", "score.py", "--data", "rows.jsonl", "--model", "none"]
    with subprocess.Popen(
        [*COMMAND, *words, "--concurrency", "1"],
        cwd=project,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # nohup ignores SIGHUP, and a shell's & SIGINT
    ) as process:
        assert process.stderr is not None
        assert any(line.startswith("1/20 done") for line in process.stderr)
        process.send_signal(number)
        began_s = time.monotonic()
        assert "to continue" in process.stderr.read().lower()
        assert process.wait() == 130
        assert time.monotonic() - began_s < 30


def test_a_refused_resume_keeps_the_results_of_the_run(project: Path, run_here: CommandLine) -> None:
    (project / "app.py").write_text(
        SPY.partition("@app.entrypoint")[0] + "@app.entrypoint\ndef invoke(payload):\n    return 1\n"
    )
    broken = "from pathlib import Path\n\ndef score(*_):\n    return Path(__file__).with_name('data').unlink() or 1\n"
    (project / "score.py").write_text(broken)
    (project / "rows.jsonl").write_text('{"prompt": "hi"}\n')
    words = ["eval", "--agent", "app.py", "--score", "score.py", "--data", "rows.jsonl", "--model", "none"]
    words += ["--repeat", "2", "--concurrency", "1"]
    (project / "broken.py").write_text("raise OSError('no lamp')\n")
    failed = run_here(project, *(word.replace("app.py", "broken.py") for word in words), "--out", "run")
    assert (failed.returncode, "no lamp" in failed.stderr) == (1, True), "an evaluation that cannot start"
    assert run_here(project, *words, "--out", "run").returncode == 1
    (project / "score.py").write_text(f"{broken}# corrected\n")
    for code in (1, 0):  # each run scores one rollout
        (project / "data").touch()
        corrected = run_here(project, *words, "--out", "run", "--resume")  # the first scorer gave no reward
        assert corrected.returncode == code, corrected.stderr
    with RunReader(project / "run") as run:
        assert [row["place"] for row in run.rollouts()] == [0, 1]
    before = {name: (project / "run" / name).read_text() for name in ("results.jsonl", "results.csv", "summary.json")}
    repeated = run_here(project, *words, "--out", "run", "--resume", "--repeat", "3")
    assert (repeated.returncode, "began with another --repeat" in repeated.stderr) == (2, True)
    (project / "score.py").write_text("def score(*_):\n    return 0\n")
    edited = run_here(project, *words, "--out", "run", "--resume")
    assert (edited.returncode, "score.py has changed since the run in run began" in edited.stderr) == (2, True)
    assert {name: (project / "run" / name).read_text() for name in before} == before


def test_invoke_runs_and_scores_one_row(project: Path, run_here: CommandLine) -> None:
    row = (project / "rows.jsonl").read_text().splitlines()[1]
    (project / "broken.py").write_text("def score(*_):\n    return {}['lamp']\n")
    words = ("invoke", "--agent", "app:app", "--score", "score.py", "--model-host", "llm.invalid")
    broken = run_here(project, *(word.replace("score.py", "broken.py") for word in words), row)
    assert broken.returncode == 1
    assert "error: the scorer broken.py:score raised KeyError: 'lamp'\n" in broken.stderr
    done = run_here(project, *words, row)
    assert done.returncode == 0, done.stderr
    assert "outcome ok   reward 1 " in done.stdout
    assert "The shop in Lamp Street 1 sells 1." in done.stdout
    assert "answer-key-41" not in done.stdout.partition("user")[0]


@pytest.fixture
def agent(tmp_path: Path) -> Path:
    """The example, with its model made in the entrypoint, and rewards that always differ."""
    folder = tmp_path / "agent"
    shutil.copytree(EXAMPLE, folder)
    source = re.sub(r"model = BedrockModel\(.*\)\n", "", (folder / "app.py").read_text())
    (folder / "app.py").write_text(source.replace("model=model", "model=BedrockModel()"))
    assert "model=BedrockModel()" in (folder / "app.py").read_text()
    scorer = "import random\n\ndef score(payload, answer, reference, trajectory):\n    assert answer\n"
    scorer += '    return {"reward": random.random(), "model_calls": len(trajectory)}\n'
    (folder / "score.py").write_text(scorer)
    rows = (EXAMPLE / "eval.jsonl").read_text().splitlines(keepends=True)
    (folder / "eval.jsonl").write_text("".join(rows[:2]))
    return folder


@pytest.mark.system
def test_an_agent_that_makes_its_bedrock_model_in_its_entrypoint_trains(agent: Path, tmp_path: Path) -> None:
    words = ["--agent", "app.py", "--score", "score.py", "--data", "train.jsonl", "--eval-data", "eval.jsonl"]
    size = ["--steps", "1", "--groups", "2", "--rollouts", "4"]
    done = run(agent, "train", *words, *size, "--out", str(tmp_path / "run"), "--json")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["steps_that_taught"], summary["outcomes"]) == (1, {"ok": 2 + 8 + 2})
    assert summary["usable_tokens"] == summary["sampled_tokens"] >= summary["gradient_tokens"] > 0
    assert min(summary[f"held_out_metrics_{when}"]["model_calls"] for when in ("before", "after")) >= 1


def test_a_program_without_this_package_is_led_to_the_gateway_by_its_variables(
    agent: Path, run_here: CommandLine
) -> None:
    words = f'{sys.executable!r}, "-m", "uvicorn", "app:app"'
    program = f'app = Program({words}, port_variable="UVICORN_PORT", wires=("bedrock",))\n'
    (agent / "program.py").write_text(f"from agentcore_rl_toolkit import Program\n\n{program}")
    done = run_here(
        agent, "eval", "--agent", "program.py", "--score", "score.py", "--data", "eval.jsonl", "--limit", "1"
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"mean of ok rollouts: model_calls [1-9]", done.stdout)


def test_the_gateway_of_a_run_gives_the_engine_its_name_of_the_model(tmp_path: Path) -> None:
    words = stack.gateway_words(stack.Upstream(url="http://127.0.0.1:9", engine="vllm"), tmp_path, None)
    assert words[words.index("--model-id") + 1] == vllm.MODEL_ID


@pytest.mark.nightly
def test_the_example_learns_its_task(tmp_path: Path) -> None:
    words = ["--agent", "app.py", "--score", "score.py", "--data", "train.jsonl", "--eval-data", "eval.jsonl"]
    size = ["--steps", "12", "--groups", "16", "--rollouts", "4", "--set", "learning_rate=6e-4"]
    done = run(EXAMPLE, "train", *words, *size, "--out", str(tmp_path / "run"), "--json")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["held_out_reward_before"] <= 0.35
    assert summary["held_out_reward_after"] >= 0.9
