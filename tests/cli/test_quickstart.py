"""The quickstart as a person runs it: a process in a terminal's place, with Ctrl-C, killed services and broken agents."""

from __future__ import annotations

import array
import base64
import contextlib
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from agentcore_rl_toolkit.cli.training.services import ServiceError, Services
from agentcore_rl_toolkit.runs import Query, RunReader, TokenSequence
from agentcore_rl_toolkit.view.data import facets
from serving import served_view, wait_for

from ..conftest import CommandLine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(800)]


def small(**settings: int) -> tuple[str, ...]:
    return tuple(word for name, value in settings.items() for word in ("--set", f"{name}={value}"))


_started: list[subprocess.Popen[str]] = []


@pytest.fixture(autouse=True)
def no_run_outlives_its_test() -> Iterator[None]:
    yield
    while _started:
        process = _started.pop()
        if process.poll() is None:
            process.kill()
        process.communicate()


def start(out: Path, *arguments: str) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "agentcore_rl_toolkit.cli", "quickstart", "--out", str(out), *arguments]
    process = subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    _started.append(process)
    return process


def finish(process: subprocess.Popen[str], deadline_s: float = 300.0) -> str:
    try:
        output, _ = process.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"still running after {deadline_s} s:\n{output}")
    return output


def processes_of(run_dir: Path) -> list[str]:
    """Living processes whose command line or working directory belongs to this run."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() == psutil.STATUS_ZOMBIE or process.pid == os.getpid():
                continue
            if str(run_dir) in " ".join(process.cmdline()) or process.cwd().startswith(str(run_dir)):
                found.append(f"{process.pid} {' '.join(process.cmdline())}")
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def assert_nothing_left(run_dir: Path) -> None:
    wait_for(lambda: not processes_of(run_dir), within_s=30)


def events(run_dir: Path) -> list[dict]:  # type: ignore[type-arg]
    path = run_dir / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


STEPS, HELD_OUT = 2, 4
WHOLE = ("--steps", str(STEPS), *small(groups=2, rollouts=2, held_out=HELD_OUT, staleness=1))


def changed_agent(folder: Path, line: str, by: str) -> Path:
    """The example's agent with one line changed."""
    examples = Path(__file__).parents[2] / "examples" / "strands_math_agent"
    source = (examples / "arithmetic_app.py").read_text()
    assert line in source
    (folder / "changed_app.py").write_text(source.replace(line, by))
    (folder / "math_tools.py").write_text((examples / "math_tools.py").read_text())
    return folder / "changed_app.py"


def agent_of_unequal_rewards(folder: Path) -> Path:
    """The example's agent, with rewards that differ a little within every group.

    Groups of equal rewards train nothing. A small run of an untrained policy may have only such, and then it has no gap
    between sampled and recomputed logprobs to look at.
    """
    line = '        "rewards": reward(response_text=result["answer"], answer=payload["answer"]),\n'
    return changed_agent(folder, line, line.replace("),\n", ') + __import__("random").random() / 1000,\n'))


@pytest.fixture(scope="module")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a whole run, and what it printed."""
    folder = tmp_path_factory.mktemp("quickstart")
    run_dir = folder / "run"
    process = start(run_dir, *WHOLE, "--agent", str(agent_of_unequal_rewards(folder)))
    output = finish(process)
    assert process.returncode == 0, output
    return run_dir, output


@pytest.mark.system
def test_a_run_leaves_all_that_it_promises_and_no_process(
    small_run: tuple[Path, str], is_what_the_docs_say: Callable[[Path, str], None]
) -> None:
    run_dir, output = small_run
    is_what_the_docs_say(run_dir, "loop")
    assert [e["step"] for e in events(run_dir) if e["event"] == "step"] == list(range(STEPS))
    assert_nothing_left(run_dir)
    assert_all_is_there(run_dir)
    assert "Held-out inputs" in output


@pytest.mark.system
def test_a_person_finds_the_least_likely_token_of_its_worst_rollout_in_the_browser(
    small_run: tuple[Path, str], browser: Any
) -> None:
    """What the page says is what the run's file says when it is read without any of the view's code."""
    run = small_run[0]
    with contextlib.closing(sqlite3.connect(run / "rollouts.sqlite")) as database:
        asked = "SELECT id FROM rollouts WHERE phase = 'train' AND step = ? AND reward IS NOT NULL ORDER BY reward, id"
        [worst] = database.execute(asked, (STEPS - 1,)).fetchone()
        asked = "SELECT data FROM parts WHERE rollout = ? AND name = 'tokens'"
        [part] = database.execute(asked, (worst,)).fetchone()
        texts = dict(database.execute("SELECT id, text FROM token_texts"))
    sampled = []
    for sequence in json.loads(zlib.decompress(part)):
        ids, logprobs = array.array("i"), array.array("f")
        ids.frombytes(base64.b64decode(sequence["ids"]))
        logprobs.frombytes(base64.b64decode(sequence["logprobs"]))
        mask = base64.b64decode(sequence["mask"])
        sampled += [(lp, token) for lp, token, trained in zip(logprobs, ids, mask, strict=True) if trained]
    logprob, token = min(sampled, key=lambda pair: pair[0])
    entries: list[str] = []
    with served_view(run.parent, run.name) as url:
        page = browser.new_page(viewport={"width": 1300, "height": 900})
        page.set_default_timeout(60_000)
        page.on("console", lambda m: entries.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda e: entries.append(str(e)))
        page.goto(url)
        page.click(f"#page table a:text-is('train {STEPS}')")
        page.click(".rows .row >> nth=0")  # a step opens with its lowest reward first
        page.click("#least")
        assert re.search(rf"/rollout/{worst}(\?|$)", page.url), page.url
        assert page.text_content(".tokens .picked") == texts[token]
        shown = re.search(r"sampler (-?[\d.]+)", page.inner_text("#picked"))
        page.close()
    assert entries == []
    assert shown is not None
    assert float(shown[1]) == pytest.approx(logprob, abs=6e-5)


@pytest.mark.nightly
def test_ctrl_c_stops_everything_and_resume_leaves_all_that_a_run_promises(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    agent = str(agent_of_unequal_rewards(tmp_path))
    process = start(run_dir, *WHOLE, "--steps", "4", "--agent", agent)
    wait_for(partial(has_step, run_dir), within_s=240, process=process)
    os.kill(process.pid, signal.SIGINT)
    output = finish(process, 150)
    assert process.returncode == 130, output
    assert f"--resume --out {run_dir}".replace(" ", "") in "".join(output.split())
    assert_nothing_left(run_dir)
    assert sum(e["event"] == "step" for e in events(run_dir)) < 4

    again = start(run_dir, "--resume")
    output = finish(again)
    assert again.returncode == 0, output
    assert [e["step"] for e in events(run_dir) if e["event"] == "step"] == [0, 1, 2, 3]
    assert_nothing_left(run_dir)
    assert_all_is_there(run_dir, steps=4)


def assert_all_is_there(run_dir: Path, steps: int = STEPS) -> None:
    """What a run leaves that was not cut short, or was gone on with."""
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["steps"] == steps
    assert summary["lost_rollouts"] == 0
    assert set(summary["causes"]) <= {"policy"}  # a policy that has learned next to nothing rambles now and then
    assert summary["outcomes"]["ok"] + summary["causes"].get("policy", 0) == summary["rollouts"]
    assert sum(summary["causes"].values()) == sum(summary["policy_failures"].values())
    assert (summary["held_out_scored_after"], summary["held_out_ok_after"]) == (HELD_OUT, HELD_OUT)
    assert summary["held_out_reward_after"] == summary["held_out_reward_ok_after"]
    assert summary["usable_tokens"] == summary["sampled_tokens"]
    assert summary["logprob_gap_max"] <= 1e-3
    with RunReader(run_dir) as kept:
        assert facets(kept.steps())["phase"] == {
            "train": 4 * steps,
            "before": HELD_OUT,
            "after": HELD_OUT,
        }  # nothing twice
        trained = [step for step in kept.steps() if step["phase"] == "train"]
        for name in ("sampled_tokens", "usable_tokens", "gradient_tokens"):  # panel, page and summary mean the same
            told = [e[name] for e in events(run_dir) if e["event"] == "step"]
            assert told == [step[name] for step in trained]
            assert sum(told) == summary[name] > 0
        rollouts = [kept.rollout(row["id"]) for row in kept.rollouts(Query(phase="train", step=steps - 1))]
        assert len(rollouts) == 4
        found = [e for e in events(run_dir) if e["event"] == "step"]
        assert all(sum(step["staleness"].values()) == step["usable"] == 4 for step in found)
        assert all(0 <= step["waiting"] <= 1 for step in found)
        for rollout in rollouts:
            assert rollout["advantage"]
            assert rollout["staleness"] in (0, 1)
            for sequence in map(TokenSequence.decoded, rollout["sequences"]):
                trained = [m == 1 for m in sequence.mask]
                assert [lp is not None for lp in sequence.logprobs] == trained
                assert [lp is not None for lp in sequence.trainer_logprobs] == trained
                assert sequence.entropies[-1] >= 0
                assert set(kept.texts(sequence.ids)) == set(sequence.ids)
        assert all(step["logprob_gap"] is None or step["logprob_gap"] <= 1e-3 for step in found)


def has_step(run_dir: Path) -> bool:
    return any(e["event"] == "step" for e in events(run_dir))


def server_of(process: subprocess.Popen[str], name: str) -> psutil.Process:
    (server,) = [
        child for child in psutil.Process(process.pid).children() if f"cli {name} serve" in " ".join(child.cmdline())
    ]
    return server


@pytest.mark.system
def test_a_killed_policy_ends_the_run(tmp_path: Path) -> None:
    """Without it the others would go on waiting: this is the one that could hang the run."""
    run_dir = tmp_path / "run"
    process = start(run_dir, "--steps", "1000", *small(held_out=2, groups=1, rollouts=2))
    wait_for(partial(has_step, run_dir), within_s=240, process=process)
    server_of(process, "policy").kill()
    output = finish(process, 90)  # of a run of a thousand steps
    assert process.returncode == 1, output
    assert "policy" in output.split("error: ", 1)[1]
    assert "killed by signal 9" in output
    assert has_step(run_dir), "what was finished stays"
    assert_nothing_left(run_dir)


def test_a_killed_service_ends_what_waits_for_it(tmp_path: Path) -> None:
    with Services(tmp_path) as services:
        service = services.launch("gateway", ["gateway", "serve"])
        services.wait_ready(service)
        threading.Timer(0.2, service.process.kill).start()
        with pytest.raises(ServiceError, match="the gateway was killed by signal 9"), services.watched():
            threading.Event().wait(60)
    assert_nothing_left(tmp_path)


def test_resume_without_a_run_says_what_to_do(tmp_path: Path, command_line: CommandLine) -> None:
    done = command_line("quickstart", "--out", str(tmp_path / "nothing"), "--resume")
    assert done.returncode == 2
    assert "no run to continue" in done.stderr
