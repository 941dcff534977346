"""The page in a real browser: the way to the worst rollout's least likely token, filters, live, from disk, nothing obeyed."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from agentcore_rl_toolkit.runs import Rollout, RunReader, RunWriter, TokenSequence, TokenTexts, locked, write_config
from agentcore_rl_toolkit.view.export import export
from runs_that_cannot_learn import SENTENCES
from runs_that_cannot_learn import write as write_unlearnable
from serving import served_view

pytestmark = pytest.mark.timeout(600)
WEIGHTS = Path(__file__).parents[2] / "src" / "agentcore_rl_toolkit" / "policy" / "weights"
HOSTILE = (
    "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>"
    "@DATA@ @CODE@ </script><script>window.hacked = 3</script><meta charset=utf-8>\\u003c 世界 İΟΔΟΣ"  # of a run as one file
)
DEADLINE_MS = 60_000


def rollout(n: int, *, phase: str = "train", step: int | None = 0, reward: float | None = 1.0, **facts: Any) -> Rollout:
    ids = [40, 41, 42, 43, 44]
    tokens = TokenSequence(
        ids=ids,
        mask=[0, 0, 1, 1, 1],
        logprobs=[None, None, -0.5, -3.0 - n / 100, -0.25],
        trainer_logprobs=[None, None, -0.5, -2.5, -0.25],
        versions=[None, None, 1, 1, 1],
        updates=0,
    )
    dialogue = [
        {"role": "user", "content": f"How many lamps in shop {n // 4}?"},
        {
            "role": "assistant",
            "tool_calls": [{"function": {"name": "calculator", "arguments": '{"expression": "1+1"}'}}],
        },
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": f"There are {n} lamps. {HOSTILE}"},
    ]
    values: dict[str, Any] = {
        "session_id": f"{phase}-{step}-{n}",
        "group": f"g{n // 4}",
        "input_key": f"input-{n // 4}",
        "place": n % 4,
        "outcome": "ok",
        "score": reward,
        "dialogue": dialogue,
        "payload": {"prompt": f"Count the lamps of shop {n // 4}. {HOSTILE}"},
        "sequences": [tokens],
        "fidelity": {"turns": 2, "sampled_tokens": 3, "trained_tokens": 3},
        "stages": {"queue": 0.1, "run": 1.0},
        "calls": [
            {"started_s": 100.2, "first_token_s": 100.3, "finished_s": 100.6, "prompt_tokens": 2, "sampled_tokens": 3}
        ],
        "ended_s": 101.0,
    }
    return Rollout(phase=phase, step=step, reward=reward, **{**values, **facts})


def write(folder: Path, kind: str) -> None:
    """A run as the loop (steps and evaluations), TRL (without metrics of the loop) or `eval` (one phase, no step) leaves it."""
    with RunWriter(folder, texts=TokenTexts(WEIGHTS)) as run:
        if kind == "eval":
            for n in range(8):
                run.rollout(rollout(n, phase="eval", step=None, reward=float(n != 5)))
            return
        for step in range(2):
            for n in range(8):
                reward = -1.0 if (step, n) == (1, 6) else float(n % 2)
                words = {"judge": {"score": reward, "reason": f"Lamp {n}. {HOSTILE}"}}
                run.rollout(rollout(n, step=step, reward=reward, reward_parts=words))
                run.annotate(f"train-{step}-{n}", advantage=reward - 0.5)
        failed = {
            "outcome": "agent_error",
            "cause": "agent",
            "mask_reason": "outcome",
            "dialogue": [],
            "sequences": None,
        }
        run.rollout(rollout(9, step=1, reward=None, error=f"ValueError: {HOSTILE}", traceback=HOSTILE, **failed))
        if kind == "loop":
            for n in range(8):
                run.rollout(rollout(n, phase="before", step=None, reward=0.0, cause=None if n else "scorer"))
                run.rollout(rollout(n, phase="after", step=None, reward=float(n > 3)))
            run.event("step", {"step": 0, "loss": 0.5, "rollout_s": 3.0, "train_s": 1.0, "metrics": {"lamps": 2.5}})
            run.event("step", {"step": 1, "loss": 0.25, "rollout_s": 2.0, "train_s": 2.0})
            run.event("evaluated", {"when": "before", "version": 0, "metrics": {"lamps": 1.25}})
            run.event("evaluated", {"when": "after", "version": 2, "metrics": {"lamps": 3.75}})


@dataclass
class Shown:
    url: str
    folder: Path
    page: Any
    console: list[str] = field(default_factory=list)

    def at(self, address: str) -> Any:
        self.page.goto("about:blank")
        self.page.goto(f"{self.url}{address}")
        return self.settled()

    def new(self, name: str) -> Path:
        """The empty folder of a run whose name begins like this, another one where a test is run again."""
        return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self.folder / "runs"))

    def settled(self) -> Any:
        """The page, when it shows the content of its address."""
        address = json.dumps(self.page.evaluate("location.hash"), ensure_ascii=False)
        self.page.wait_for_selector(f"#page[data-shown={address}]")
        return self.page


PLOT = 'document.querySelector(`[data-title="%s"] .plot`).chart'


def chart(page: Any, title: str) -> dict[str, list[float | None]]:
    """The values that a chart draws, by the name of the curve."""
    return dict(
        page.evaluate(f"(() => {{ const c = {PLOT % title}; return c.series.map((s, i) => [s.label, c.data[i]]); }})()")
    )


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    work = tmp_path_factory.mktemp("view")
    for kind in ("loop", "trl", "eval"):
        write(work / "runs" / kind, kind)
    with served_view(work) as url:
        yield url, work


@pytest.fixture
def shown(browser: Any, served: tuple[str, Path]) -> Iterator[Shown]:
    """A new page; at the end its console is clean, and nothing that a model wrote has run."""
    page = browser.new_page(viewport={"width": 1300, "height": 900})
    page.set_default_timeout(DEADLINE_MS)
    found = Shown(served[0], served[1], page)
    page.on("console", lambda m: found.console.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda e: found.console.append(str(e)))
    yield found
    assert page.evaluate("window.hacked") is None
    page.close()
    assert found.console == []


def test_a_run_that_began_a_moment_ago_is_found(served: tuple[str, Path]) -> None:
    url, key = served[0].split("/?")
    folder = Path(tempfile.mkdtemp(prefix="new-", dir=served[1] / "runs"))
    urllib.request.urlopen(f"{url}/api/runs?{key}", timeout=30).close()  # the server has read the folders of runs
    with RunWriter(folder) as run:
        run.rollout(rollout(0))
    with urllib.request.urlopen(f"{url}/api/runs?{key}", timeout=30) as answer:
        assert folder.name in [run["name"] for run in json.load(answer)]
    with RunWriter(folder := Path(tempfile.mkdtemp(prefix="new-", dir=served[1] / "runs"))) as run:
        run.rollout(rollout(0))
    with urllib.request.urlopen(f"{url}/api/runs/{folder.name}?{key}", timeout=30) as answer:
        assert json.load(answer)["name"] == folder.name


@pytest.mark.parametrize("address", ["#/", "#/run/{run}"])
def test_a_change_while_the_page_is_made_appears_in_it(shown: Shown, address: str) -> None:
    """The page asks what is new since its data, not since its first question."""
    write(folder := shown.new("grows"), "eval")
    changed: list[Path] = []

    def change(route: Any) -> None:
        if not changed:
            changed.append(shown.new("late"))
            for where in (changed[0], folder):
                with RunWriter(where) as run:
                    run.rollout(rollout(99, phase="eval", step=None))
            shown.page.wait_for_timeout(1100)  # the server reads its folders once a second
        route.continue_()

    shown.page.route("**/api/version?*", change)
    page = shown.at(address.format(run=folder.name))
    what = f"a:text-is('{changed[0].name}')" if address == "#/" else ".fact:has-text('rollouts'):has-text('9')"
    page.wait_for_selector(f"#page {what}")
    page.unroute("**/api/version?*")


def test_content_of_the_address_before_is_marked_and_takes_no_keys(shown: Shown) -> None:
    page = shown.at("#/run/loop/rollouts")
    held: list[Any] = []
    page.route("**/api/runs/trl/*", lambda route: held.append(route))
    page.evaluate("location.hash = '#/run/trl/rollouts'")
    page.wait_for_selector("#page[aria-busy]")
    for key in ("j", "Enter"):
        page.keyboard.press(key)
    assert page.inner_text("h1") == "loop: rollouts"
    assert page.evaluate("location.hash") == "#/run/trl/rollouts"
    for route in held:
        route.continue_()
    page.unroute("**/api/runs/trl/*")
    shown.settled()
    assert page.inner_text("h1") == "trl: rollouts"
    assert page.locator("#page[aria-busy]").count() == 0


@pytest.mark.parametrize("kind", ["loop", *(pytest.param(k, marks=pytest.mark.nightly) for k in ("trl", "eval"))])
def test_from_the_run_to_the_least_likely_token_of_the_worst_rollout_of_the_last_step(shown: Shown, kind: str) -> None:
    page = shown.at("")
    page.click(f"#page a:text-is('{kind}')")
    page.wait_for_selector(f"#page h1:text-is('{kind}')")  # until then a run in the list may be named like a step
    step = "eval" if kind == "eval" else "train 2"
    page.click(f"#page table a:text-is('{step}')")
    page.click(".rows .row >> nth=0")  # the address of a step sorts by reward, the lowest first
    page.wait_for_selector("#dialogue")
    worst = 5 if kind == "eval" else 6
    assert f"There are {worst} lamps" in page.inner_text("#dialogue")
    assert HOSTILE in page.inner_text("#dialogue")
    page.click("#least")
    page.wait_for_selector(".tokens .picked")
    shown.settled()
    assert page.text_content(".tokens .picked") == TokenTexts(WEIGHTS).of([43])[43]
    assert f"sampler {-3.0 - worst / 100:.4f}" in page.inner_text("#picked")
    assert "gap 0.5" in page.inner_text("#picked")
    assert "token=0%3A3" in page.url  # a link to this token


def test_filters_orders_and_keys(shown: Shown) -> None:
    page = shown.at("#/run/loop/rollouts")
    assert page.inner_text("#count") == "33 rollouts"
    page.select_option("[name=outcome]", "cause:agent")
    page.wait_for_selector("#count:text-is('1 rollout')")
    page.fill("[name=text]", "no such word")
    page.wait_for_selector(".none:has-text('No rollout fits these filters')")
    page.fill("[name=text]", "😀")  # one character
    page.wait_for_selector("[name=text]:invalid")
    page.fill("[name=text]", "")
    page.wait_for_selector("#count:text-is('1 rollout')")
    assert "ValueError: <script>" in page.inner_text(".rows .row")
    page.select_option("[name=outcome]", "")
    page.fill("[name=text]", "shop 1")
    page.wait_for_selector("#count:text-is('16 rollouts')")
    page.fill("[name=number]", "2")  # as the column counts: the file's steps begin with 0
    page.wait_for_selector("#count:text-is('4 rollouts')")
    assert set(page.locator(".rows .row > :nth-child(2)").all_inner_texts()) == {"train 2"}
    page.fill("[name=number]", "1.5")
    page.wait_for_selector("[name=number]:invalid")
    page.fill("[name=number]", "2")
    shown.settled().wait_for_selector(".rows .row >> nth=3")
    page.keyboard.press("j")
    page.focus("[data-sort=reward]")
    page.keyboard.press("Enter")  # of a button, not of the list
    page.wait_for_selector("[data-sort=reward][aria-sort=ascending]")
    assert "number=2" in page.url  # a link that gives the same list
    shown.settled().wait_for_selector(".rows .row >> nth=3")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_selector("#dialogue")
    assert "There are 6 lamps" in page.inner_text("#dialogue")
    page.keyboard.press("?")
    assert "the group of this rollout" in page.inner_text("#keys[open]")
    page.keyboard.press("Escape")
    page.wait_for_selector("#keys:not([open])", state="attached")
    page.keyboard.press("l")
    page.wait_for_selector(".tokens .picked")
    page.keyboard.press("t")
    page.wait_for_selector("#dialogue")
    page.keyboard.press("j")  # the next of the filtered list
    page.wait_for_selector("#dialogue:has-text('There are 4 lamps')")
    assert page.locator("nav .item").count() == 4
    page.fill("[name=find]", "lamps")
    page.wait_for_selector("#hits:text-is('2 places')")


def test_links_of_a_group_open_by_keyboard_and_a_wrong_address_shows_the_run(shown: Shown) -> None:
    page = shown.at("#/run/loop/group/1")
    page.focus(".member[data-id='4']")
    page.keyboard.press("Enter")
    page.wait_for_selector("h1:text-is('Rollout 4')")
    page = shown.at("#/run/loop/%zz")
    page.wait_for_selector("#diagnosis", state="attached")


def test_a_rollout_shows_its_fidelity_and_its_raw_record(shown: Shown) -> None:
    page = shown.at("#/run/loop/rollout/1")
    assert page.inner_text(".judge").startswith("The judge gave 0: Lamp 0. <script>")
    page.click("#fidelity summary")
    assert page.locator("#fidelity dt").all_inner_texts() == ["turns", "sampled tokens", "trained tokens"]
    page.click("summary:text-is('input')")
    assert '"prompt": "Count the lamps of shop 0. <script>' in page.inner_text(
        "details:has(summary:text-is('input')) pre"
    )


@pytest.mark.system
@pytest.mark.parametrize("colour", ["mask", "entropy", "advantage"])
def test_tokens_are_coloured_and_say_their_numbers(shown: Shown, colour: str) -> None:
    page = shown.at(f"#/run/loop/rollout/1?view=tokens&colour={colour}")
    classes = page.get_attribute("[data-at='0:3']", "class")
    assert classes == {"mask": "trained m1", "entropy": "trained c0", "advantage": "trained n2"}[colour]
    assert page.get_attribute("[data-at='0:0']", "class") == "context"
    page.hover("[data-at='0:3']")
    assert "sampler -3 (4.98 %)" in page.inner_text("#tip")
    assert "entropy –" in page.inner_text("#tip")  # absent is not zero
    assert (page.locator("#unknown").count() == 1) == (colour == "entropy")


@pytest.mark.system
def test_branches_have_their_reasons_and_stages_are_a_waterfall(shown: Shown) -> None:
    def part(n: int, turns: list[str], context: list[str], why: str | None) -> TokenSequence:
        ids = [40, 41, 42, 43]
        return TokenSequence(ids=ids, mask=[0, 0, 1, 1], turn_ids=turns, context_turn_ids=context, branch_reason=why)

    branched = [part(0, ["t1", "t2"], [], None), part(1, ["t3"], ["t1"], "history_rewritten")]
    calls = [
        {"started_s": s, "first_token_s": None, "finished_s": s + 0.5, "prompt_tokens": 2, "sampled_tokens": 2}
        for s in (100.5, 101.5)
    ]
    stages = {"queue": 0.25, "start": 0.25, "run": 2.0, "result": 0.1, "stop": 0.4}
    with RunWriter(shown.folder / "runs" / "branched") as run:
        facts = {"metrics": {"solved": True, "loss": 0.00025}}
        run.rollout(rollout(0, sequences=branched, calls=calls, stages=stages, ended_s=102.9, **facts))
    page = shown.at("#/run/branched/rollout/1?view=tokens")
    assert page.locator("dt:text-is('solved') + dd, dt:text-is('loss') + dd").all_inner_texts() == ["1", "2.5e-4"]
    rows = [row.split("\t") for row in page.locator("#branches tbody tr").all_inner_texts()]
    assert rows == [["1", "1, 2", "–", "2", "the first"], ["2", "3", "1", "2", "history rewritten"]]
    labels = page.locator(".fall > span:not(.num)").all_text_contents()
    assert labels == [
        *("queue", "start", "run", "agent", "model call 1", "tool calculator", "model call 2", "agent"),
        *("result", "stop"),
    ]


@pytest.mark.system
@pytest.mark.parametrize(
    ("first", "second", "inputs", "better", "worse"),
    [
        ("loop@before", "loop@after", 2, 1, 0),
        ("loop@train:0", "loop@train:1", 2, 0, 1),
        ("trl@train:1", "loop@train:0", 2, 1, 0),
    ],
    ids=["phases", "steps", "runs"],
)
def test_two_phases_steps_or_runs_are_compared_on_the_same_inputs(
    shown: Shown, first: str, second: str, inputs: int, better: int, worse: int
) -> None:
    page = shown.at(f"#/compare?first={first}&second={second}")
    assert f"{inputs} inputs in both: {better} better, {worse} worse" in page.inner_text("#page")
    assert page.locator("#compared tbody tr").count() == inputs
    assert page.inner_text("#compared tbody td >> nth=0").startswith("Count the lamps of shop")


@pytest.mark.system
def test_a_run_that_goes_on_is_shown_as_it_grows(shown: Shown) -> None:
    folder = shown.new("growing")
    with RunWriter(folder) as run:
        run.rollout(rollout(0))
        assert run.flush()
        page = shown.at(f"#/run/{folder.name}/rollouts")
        page.wait_for_selector(".live:text-is('live')")
        assert page.inner_text("#count") == "1 rollout"
        # Every look of the server may be its first at this run: keep writing until it was seen.
        for n in range(1, 200):
            run.rollout(rollout(n))
            assert run.flush()
            if page.inner_text("#count") != "1 rollout":
                break
            page.wait_for_timeout(200)
        assert page.inner_text("#count") != "1 rollout"


@pytest.mark.system
def test_an_exported_run_opens_from_disk(shown: Shown, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "agentcore_rl_toolkit",
        "view",
        "loop",
        "--export",
        str(tmp_path / "r.html"),
    ]
    done = subprocess.run(command, cwd=shown.folder, capture_output=True, text=True, timeout=300)
    assert "This file holds all 33 rollouts of the run." in done.stdout, done.stderr
    page = shown.page
    page.goto((tmp_path / "r.html").as_uri())
    page.click("#page table a:text-is('train 2')")
    page.click(".rows .row >> nth=0")
    page.wait_for_selector("#dialogue")
    assert HOSTILE in page.inner_text("#dialogue")
    page.click("#least")
    page.wait_for_selector(".tokens .picked")
    assert "sampler -3.0600" in page.inner_text("#picked")
    page.click("#group")
    page.wait_for_selector(".member")
    assert page.locator(".member").count() == 4
    page.click("#bar a:text-is('Compare')")
    page.select_option("[name=first]", "loop@before")
    shown.settled().select_option("[name=second]", "loop@after")
    page.wait_for_selector("#page:has-text('2 inputs in both: 1 better, 0 worse')")


@pytest.mark.system
def test_a_run_shows_evaluations_and_the_agents_metrics_counts_steps_from_1_and_is_not_live_once_it_ended(
    shown: Shown,
) -> None:
    page = shown.at("#/run/loop")
    assert chart(page, "Reward")["held out"] == [0, None, 0.5]  # before, and after the two steps
    assert chart(page, "The agent's metrics")["lamps"] == [2.5]
    page.click("#numbers summary")
    page.wait_for_selector("#numbers .card")
    names = page.locator("#numbers .card b").all_inner_texts()
    assert {"loss", "metrics/lamps", "rollout_s", "train_s", "staleness"} - {*names} == {
        "staleness"
    }  # what has no value has none
    page.fill("#numbers input", "lamps")
    page.wait_for_selector("#numbers .card >> nth=1", state="detached")
    rows = page.locator("#steps tbody tr").all_inner_texts()
    assert [row.split("\t")[0] for row in rows] == ["train 1", "train 2", "before evaluation", "after evaluation"]
    for at, metric in (("train 1", "2.500"), ("train 2", "–"), ("before", "1.250"), ("after", "3.750")):
        [row] = [row for row in rows if row.startswith(at)]
        assert row.split("\t")[8] == metric
    change = {"held_out_change": {"text": "cannot tell: on the same 2 inputs"}}
    loop, trl = (
        shutil.copytree(shown.folder / "runs" / kind, shown.new(kind), dirs_exist_ok=True) for kind in ("loop", "trl")
    )
    (loop / "summary.json").write_text(json.dumps({"steps": 2, **change}))
    assert "Verdict: cannot tell: on the same 2 inputs" in shown.at(f"#/run/{loop.name}").inner_text("#page")
    page = shown.at(f"#/run/{loop.name}/rollouts")
    page.wait_for_selector(".live:text-is('finished')")
    with locked(trl):
        shown.at(f"#/run/{trl.name}").wait_for_selector(".live:text-is('live')")
    shown.at(f"#/run/{trl.name}").wait_for_selector("h1 .status:text-is('stopped')")
    with (trl / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"event": "failed", "reason": "no rollout can be used"}) + "\n")
    page = shown.at(f"#/run/{trl.name}")
    page.wait_for_selector("h1 .status:text-is('failed')")
    assert page.get_attribute("h1 .status", "title") == "failed: no rollout can be used"
    page.wait_for_selector(".live.ended", state="hidden")  # the status is shown once
    page = shown.at("#/run/loop/rollouts")
    assert "Count the lamps of shop 0" in page.inner_text(".rows .row >> nth=0")
    page = shown.at("#/compare?first=trl@train:0&second=loop@train:1")
    assert set(chart(page, "reward")) >= {"trl", "loop"}  # the curves of both runs
    assert page.input_value("[name=second]") == "loop@train:1"
    assert page.inner_text("[name=second] option:checked") == "loop, train 2"


@pytest.mark.system
def test_a_curve_stops_at_a_missing_step_and_a_constant_is_not_drawn_as_0(shown: Shown) -> None:
    with RunWriter(folder := shown.new("gaps")) as run:
        for step in (0, 1, 3, 4):
            run.rollout(rollout(0, step=step, reward=0.5, session_id=f"gaps-{step}"))
            run.event("step", {"step": step, "loss": 8.0})
    page = shown.at(f"#/run/{folder.name}")
    assert chart(page, "Loss")["loss"] == [8, 8, None, 8, 8]
    low, high = page.evaluate("(() => { const y = %s.scales.y; return [y.min, y.max]; })()" % (PLOT % "Loss"))
    assert low < 8 < high


@pytest.mark.system
def test_tokens_are_reached_by_keyboard_and_the_reward_is_in_sight_on_a_phone(shown: Shown) -> None:
    page = shown.at("#/run/loop/rollout/1?view=tokens")
    page.focus(".tokens")
    for key in ("ArrowRight", "End", "ArrowLeft"):
        page.keyboard.press(key)
    assert page.get_attribute(".tokens .picked", "data-i") == "3"
    assert "sampler -3" in page.inner_text("#picked")
    page.set_viewport_size({"width": 390, "height": 800})
    page = shown.at("#/run/loop/rollouts")
    box = page.locator(".rows .row >> nth=0").locator(":scope > *:nth-child(5)").bounding_box()
    assert box is not None
    assert box["x"] + box["width"] <= 390
    page = shown.at("#/run/loop")
    assert (
        page.evaluate("""() => [...document.querySelectorAll('.fact b')].every((e) =>
      e.textContent.split(' ').length >= Math.round(e.getBoundingClientRect().height / 25))""")
    )  # no word over two lines


QUERIES = [
    {"phase": "train", "sort": "reward"},
    {"phase": "after", "sort": "reward", "descending": "1"},
    {"number": "2"},
    {"phase": "train", "number_from": "2", "sort": "id", "descending": "1"},
    {"outcome": "cause:agent"},
    {"outcome": "ok", "reward_to": "0"},
    {"reward_from": "1", "sort": "logprob_min"},
    {"group": "g1", "phase": "train"},
    {"input": "input-0"},
    {"tool": "calculator", "tokens_from": "3", "sort": "grp"},
    {"tool": ""},
    {"tool": "constructor"},
    {"tokens_to": "2"},
    {"usable": "0"},
    {"usable": "1", "sort": "advantage"},
    {"gradient": "0"},
    {"gradient": "1"},
    {"cut": "1"},
    {"failed": "1"},
    {"unparsed": "0", "phase": "before"},
    {"stop": "agent_error"},
    {"error": f"ValueError: {HOSTILE}"},
    {"text": "LAMPS IN SHOP 1"},
    {"text": "世界"},
    {"text": "ος"},
    {"text": "İοδος"},
    {"text": "onerror='window"},
    {"text": "no such word"},
    {"text": "null"},
]


@pytest.mark.system
def test_an_exported_run_answers_the_same_queries_as_the_server(shown: Shown, tmp_path: Path) -> None:
    with RunReader(shown.folder / "runs" / "loop") as run:
        assert export(run, tmp_path / "all.html") == "This file holds all 33 rollouts of the run."

    def ids(page: Any, address: str) -> tuple[str, list[str]]:
        page.goto("about:blank")
        page.goto(address)
        shown.settled()
        return page.inner_text("#count"), page.locator(".rows .row").evaluate_all(
            "rows => rows.map((r) => r.dataset.id)"
        )

    for query in QUERIES:
        words = f"#/run/loop/rollouts?{urllib.parse.urlencode(query)}"
        served, held = (
            ids(shown.page, f"{shown.url}{words}"),
            ids(shown.page, f"{(tmp_path / 'all.html').as_uri()}{words}"),
        )
        assert served == held, query


@pytest.mark.system
def test_a_file_of_a_large_run_holds_all_evaluations_and_says_what_is_left_out(shown: Shown, tmp_path: Path) -> None:
    with RunReader(shown.folder / "runs" / "loop") as run:
        said = export(run, tmp_path / "part.html", limit=8)
    assert said.startswith(
        "This file holds 25 of the 33 rollouts of the run: all 16 of evaluations, and 9 of 17 of the"
    )
    for page in ("rollouts", "rollout/1", "group/1", "evaluation?phase=before"):
        shown.page.goto("about:blank")
        shown.page.goto(f"{(tmp_path / 'part.html').as_uri()}#/run/loop/{page}")
        shown.page.wait_for_selector(f".notice:has-text('{said[:60]}')")
    shown.page.goto(f"{(tmp_path / 'part.html').as_uri()}#/compare?first=loop@before&second=loop@after")
    shown.page.wait_for_selector("#compared-counts:has-text('2 inputs in both: 1 better, 0 worse')")
    shown.page.wait_for_selector("#page:has-text('Paired by input: cannot tell')")


@pytest.mark.system
def test_more_tabs_open_than_a_browser_has_connections_to_a_host(browser: Any, shown: Shown) -> None:
    context = browser.new_context()
    context.set_default_timeout(DEADLINE_MS / 2)
    context.new_page().goto(shown.url)
    for n in range(1, 9):
        page = context.new_page()
        page.goto(f"{shown.url}#/run/loop/rollout/{n}", wait_until="commit")
        page.wait_for_selector(f"h1:text-is('Rollout {n}')")
    context.close()


@pytest.mark.system
def test_a_page_that_is_drawn_again_keeps_nothing_of_what_it_showed(shown: Shown) -> None:
    page = shown.at("#/run/loop")
    page.click("#numbers summary")
    session, found = page.context.new_cdp_session(page), []
    for count in (4, 12):
        for n in range(count):
            page.evaluate("document.querySelector('h1').className = 'old'")
            page.emulate_media(color_scheme=("dark", "light")[n % 2])  # draws it again
            page.wait_for_selector("h1:not(.old)")
        session.send("HeapProfiler.collectGarbage")
        found.append(session.send("Memory.getDOMCounters"))
    for kind in ("nodes", "jsEventListeners"):
        assert found[1][kind] < 1.5 * found[0][kind], found


@pytest.mark.system
def test_runs_are_compared_whatever_their_names_contain(shown: Shown) -> None:
    names = [shown.new(f"lr=0.1,seed={n}&x").name for n in range(2)]
    for name in names:
        write(shown.folder / "runs" / name, "trl")
    page = shown.at(
        f"#/compare?{urllib.parse.urlencode({'first': f'{names[0]}@train', 'second': f'{names[0]}@train'})}"
    )
    page.evaluate("document.querySelector('details').open = true")
    page.check(f"[name='run-{names[1]}']")
    page.wait_for_selector("summary:has-text('2 runs chosen')")
    assert set(chart(page, "reward")) == {"step", *names}


@pytest.mark.system
def test_places_of_a_text_are_marked_where_they_are(shown: Shown) -> None:
    page = shown.at("#/run/loop/rollout/1?find=οδος")
    assert set(page.locator("#dialogue mark.hit").all_inner_texts()) == {"ΟΔΟΣ"}


@pytest.mark.system
def test_groups_of_the_first_steps_are_not_praised_and_unknown_seconds_are_no_estimate(shown: Shown) -> None:
    for steps, said in ((2, "No problem is known yet: most tool calls"), (3, "most groups have rewards that differ")):
        with RunWriter(folder := shown.new("young")) as run:
            for n in range(8 * steps):
                reward = float(n % 2 and steps > 2)
                run.rollout(rollout(n, step=n // 8, reward=reward, session_id=f"young-{n}"))
            run.event("step", {"step": 0, "loss": 0.5})  # TRL's have no seconds
        write_config(folder, {"steps": 100})
        page = shown.at(f"#/run/{folder.name}")
        assert said in page.inner_text("#diagnosis")
        assert page.inner_text(".fact >> nth=0").split("\n") == ["steps", f"{steps} of 100"]


@pytest.mark.system
def test_parallel_calls_have_their_own_tools_and_a_rollout_without_a_call_says_so(shown: Shown) -> None:
    write_unlearnable(shown.folder / "runs" / "parallel", "one_error", steps=1)
    page = shown.at("#/run/parallel/rollout/1")
    labels = page.locator(".fall > span:not(.num)").all_text_contents()
    assert [label for label in labels if "tool" in label] == ["tool get_order", "tool get_policy"]
    page = shown.at("#/run/parallel/rollout/56?view=tokens")  # after 50 evaluations, the sixth of its group
    assert "the rollout made no model call" in page.inner_text(".main")
    assert "logprobs" not in page.inner_text("#page")


def test_the_first_screen_says_why_a_run_does_not_learn(shown: Shown) -> None:
    folder = shown.new("cut")
    write_unlearnable(folder, "cut")
    page = shown.at(f"#/run/{folder.name}")
    first = page.locator(".finding").first
    assert first.get_attribute("data-name") == "cut"
    assert SENTENCES["cut"] in first.inner_text()
    assert page.inner_text("h1 .status") == "stopped at 12 of 100"
    counts = page.locator(".fact", has_text="rollouts").first
    assert counts.inner_text().split("\n") == ["rollouts", "192+ 100 held out"]  # with a margin between
    held = chart(page, "Reward")
    for mean, low, high in zip(*(held[name] for name in ("held out", "held out, low", "held out, high")), strict=True):
        assert mean is None or low <= mean <= high
    box = first.bounding_box()
    assert box is not None
    assert box["y"] + box["height"] < 300, "it is seen without scrolling"
    first.locator("a").click()
    page.wait_for_selector("#count:text-is('64 rollouts')")  # the number in the sentence


def test_the_server_answers_nobody_else_and_allows_no_remote_part(served: tuple[str, Path]) -> None:
    url, key = served[0].split("/?")
    with urllib.request.urlopen(f"{url}/?{key}", timeout=30) as answer:
        policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    for headers, asked, status in (
        ({"Host": "evil.example"}, key, 421),
        ({"Origin": "http://evil.example"}, key, 403),
        ({}, "key=guessed", 401),
        ({"Cookie": f"agentcore-rl-view-{url.rpartition(':')[2]}=guessed"}, "", 401),
    ):
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(urllib.request.Request(f"{url}/api/runs?{asked}", headers=headers), timeout=30)
        assert refused.value.code == status
        refused.value.close()
    for path in (
        "static/..%2f..%2fexport.py",
        "static/nothing.js",
        "api/runs/nothing",
        "api/runs/loop/rollouts?sort=evil&",
    ):
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"{url}/{path.rstrip('&')}{'&' if '&' in path else '?'}{key}", timeout=30)
        assert refused.value.code == 404
        refused.value.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_the_server_of_a_background_job(tmp_path: Path, number: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "agentcore_rl_toolkit", "view", "--no-open"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),  # as a shell's & does
    ) as process:
        assert process.stdout is not None
        urllib.request.urlopen(process.stdout.readline().strip(), timeout=60).close()
        process.send_signal(number)
        assert process.wait(30) in (0, 130)
