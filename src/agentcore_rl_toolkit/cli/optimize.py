"""`agentcore-rl optimize`: search for better texts of an agent, such as its system prompt, with rollouts."""

from __future__ import annotations

import dataclasses
import json
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from ..backends.collection.groups import Group, GroupRequest
from ..backends.collection.groups import summarize as summarize_groups
from ..backends.collection.recording import input_key
from ..backends.gepa.adapter import Scored, search
from ..backends.gepa.reflection import Reflection
from ..backends.gepa.settings import SearchSettings
from ..backends.llm_judge import JudgeSettings, cut, dialogue_of, transcript
from ..client import BatchItem
from ..client.evaluation import EvalRow, read_rows, score_of, summarize
from ..contract import INFO_FIELD, TEXTS_FIELD, redact
from ..errors import ConfigError, RolloutError
from ..runs import locked, read_config, write_config
from ..runs.folder import ROLLOUTS, read_metrics
from ..stats.differences import change_of
from .eval import check_options, experiment, most_frequent, open_rollouts, with_agent
from .options import from_environment, settings_of, settings_option
from .output.commands import nearby
from .output.terminal import visible
from .training.evaluation import Opened, collect, evaluation_config, item_of

FILE = "rollout_texts.json"
SHOWN = 4000  # characters of a payload, a dialogue or a result that the reflection model sees
ROWS = click.Path(path_type=Path, exists=True, dir_okay=False)
COUNTED = ("rollouts", "reflections", "input_tokens", "output_tokens", "judge_calls", "judge_usd")


@click.command()
@with_agent
@click.option("--eval-data", required=True, type=ROWS, help="Rows for the evaluations before and after the search.")
@click.option(
    "--reflect-url", required=True, help="OpenAI-compatible API of the reflection model, which proposes texts."
)
@click.option(
    "--reflect-model", required=True, help="Name of the reflection model; its key is AGENTCORE_RL_REFLECT_KEY."
)
@from_environment("--reflect-key", "AGENTCORE_RL_REFLECT_KEY")
@click.option("--text", "names", multiple=True, metavar="NAME", help="A text to change; repeatable. [default: all]")
@click.option("--max-rollouts", type=click.IntRange(min=1), help="Largest number of rollouts. [default: 500]")
@click.option(
    "--session-env", multiple=True, metavar="K=V", help="A variable for all sessions on this machine; repeatable."
)
@settings_option
def command(words: tuple[str, ...], **options: Any) -> None:
    """Search for better texts of an agent whose model is not trained.

    The agent reads its texts with `rollout_text`. A reflection model sees rollouts with their rewards, and proposes texts. The
    search algorithm GEPA keeps texts that get a higher reward on other rows. The best texts are written to
    OUT/rollout_texts.json. Put this file next to the code of the agent. The command prints the reward on --eval-data before and
    after, with 95 % intervals, and OUT/summary.json contains it.

    Settings of --set: batch, perfect, concurrency, timeout_s, sampling_params, seed, max_usd, usd_per_rollout,
    usd_per_million_input, usd_per_million_output.

    \b
    Example:
        agentcore-rl optimize --agent ARN --bucket NAME --data train.jsonl --eval-data eval.jsonl
            --reflect-url https://HOST/v1 --reflect-model NAME
    """
    options |= {"base_url": None, "model_id": None, "api_key": None, "readable": (), "writable": ()}
    budget = () if options["max_rollouts"] is None else (f"max_rollouts={options['max_rollouts']}",)
    settings = settings_of((*words, *budget), SearchSettings)
    rows, held_out = read_rows(options["data"]), read_rows(options["eval_data"])
    check_options(options)
    both = {input_key(row.payload) for row in rows} & {input_key(row.payload) for row in held_out}
    if both:
        raise ConfigError(f"{len(both)} rows of --eval-data are in --data too; the search must not see held-out rows")
    random.Random(settings.seed).shuffle(rows)
    learned, compared = rows[: len(rows) // 2], rows[len(rows) // 2 :]
    least = 1 + 2 * len(held_out) + 2 * len(compared) + 2 * settings.batch
    if not learned or not settings.allows(dict.fromkeys(COUNTED, 0), least):
        raise ConfigError(
            f"--data has {len(rows)} rows and --eval-data {len(held_out)}: the search needs two rows of --data, and "
            f"{least} rollouts for one proposal, within --max-rollouts and max_usd"
        )
    exp_id, out = experiment(options, "optimize")
    out.mkdir(parents=True, exist_ok=True)
    shown = ("agent", "data", "eval_data", "reflect_url", "reflect_model", "model", "names")
    used = input_key({"rows": [row.payload for row in (*learned, *compared, *held_out)], "names": options["names"]})
    config = {"kind": "optimize", "exp_id": exp_id, "rows": used, "settings": dict(settings)}
    config |= {name: options[name] for name in shown}
    with locked(out):
        write_config(out, config, replace=not (out / ROLLOUTS).exists())
        if read_config(out).get("rows") != used:
            raise ConfigError(f"{nearby(out)} is a run with other rows, texts or another seed: choose another --out")
        with open_rollouts(options, exp_id, out, settings.max_rollouts) as opened:
            facts = _Optimisation(opened, out, settings, options).run(learned, compared, held_out)
    (out / "summary.json").write_text(json.dumps(facts, indent=2) + "\n")
    click.echo(visible(_report(facts)))
    click.echo(f"results: {nearby(out)}", err=True)


class _Optimisation:
    """A run: the evaluation before, the search, the evaluation after. Results of an earlier part are in the folder."""

    def __init__(self, opened: Opened, out: Path, settings: SearchSettings, options: dict[str, Any]) -> None:
        self._opened, self._out, self._settings, self._options = opened, out, settings, options
        self._events = read_metrics(out)
        self._spent: dict[str, float] = dict.fromkeys(COUNTED, 0)
        for cost in (event for event in self._events if event["event"] == "spent"):
            self._spent = {name: so_far + cost.get(name, 0) for name, so_far in self._spent.items()}
        self._steps = sum(event["event"] == "tried" for event in self._events)

    def run(self, learned: list[EvalRow], compared: list[EvalRow], held_out: list[EvalRow]) -> dict[str, Any]:
        """Search for better texts, and return the facts. Raises: ConfigError, RolloutError, TrainingServiceError."""
        kept, options = self._opened.recording.run, self._options
        url, model, key = options["reflect_url"], options["reflect_model"], options["reflect_key"]
        reflection = Reflection(url, model, key, spent=self._count)
        before = next((event for event in self._events if event["event"] == "before"), None)
        kept.forget(from_step=self._steps, phases=("after",) if before else ("before", "after"))
        if before is None:
            reflection("Answer with one word: ready")  # checks the endpoint before the first rollout
            before = self._held_out("before", held_out, self._texts_read(learned[0]))
        proposal = 2 * self._settings.batch + len(compared)
        found = search(
            {name: before["texts"][name] for name in options["names"] or before["texts"]},
            learned,
            compared,
            self._search_step,
            reflection,
            stop=lambda: not self._settings.allows(self._spent, proposal + len(held_out)),
            settings=self._settings,
            folder=self._out / "gepa",
        )
        (self._out / "candidates.json").write_text(json.dumps(found, indent=2) + "\n")
        facts: dict[str, Any] = {"before": before["summary"], "after": None, "gain": None, "texts": None}
        best = max(found, key=lambda candidate: candidate["mean"])  # the first of equals
        if best is not found[0]:
            after = self._held_out("after", held_out, best["texts"])
            pairs = zip(before["scores"], after["scores"], strict=True)
            gain = change_of([(early, late) for early, late in pairs if early is not None and late is not None])
            facts |= {"after": after["summary"], "gain": gain, "texts": before["texts"] | best["texts"]}
            (self._out / FILE).write_text(json.dumps(facts["texts"], indent=2, ensure_ascii=False) + "\n")
        return {
            **facts,
            "candidates": len(found),
            "spent": {**self._spent, "usd": self._settings.usd(self._spent) or None},
        }

    def _count(self, **cost: float) -> None:
        for name, value in cost.items():
            self._spent[name] += value
        self._opened.recording.run.event("spent", cost)

    def _texts_read(self, row: EvalRow) -> dict[str, str]:
        """Return the texts that the agent reads, by name. Raises: ConfigError if it reads none, or not each of --text."""
        [first] = self._evaluate([row], {}, "eval")
        read: dict[str, str] = (first.item.result or {}).get(INFO_FIELD, {}).get(TEXTS_FIELD, {})
        unread = [name for name in self._options["names"] if name not in read] or ([] if read else ["NAME"])
        if unread:
            raise ConfigError(
                f"the agent does not read the text {unread[0]!r} (it reads: {', '.join(read) or 'none'}): let it call "
                f'rollout_text(payload, "{unread[0]}", "the text of today")'
            )
        return read

    def _held_out(self, phase: str, rows: list[EvalRow], texts: Mapping[str, str]) -> dict[str, Any]:
        """Run the rows that the search never sees."""
        began_s = time.monotonic()
        results = self._evaluate(rows, texts, phase)
        summary = summarize([r.item for r in results], time.monotonic() - began_s)
        click.echo(visible(f"{phase}: {summary}"), err=True)
        facts = {"texts": texts, "scores": [r.score for r in results], "summary": dataclasses.asdict(summary)}
        self._opened.recording.run.event(phase, facts)
        return facts

    def _search_step(self, rows: Sequence[EvalRow], texts: Mapping[str, str]) -> list[Scored]:
        results = self._evaluate(rows, texts, "train", self._steps)
        each = [(row.input_id, r.score) for row, r in zip(rows, results, strict=True)]
        self._opened.recording.run.event("tried", {"step": self._steps, "texts": texts, "scores": each})
        self._steps += 1
        mean = statistics.fmean(r.score for r in results if r.score is not None)
        click.echo(f"{self._spent['rollouts']} rollouts: mean reward {mean:.4f} of {len(rows)} rows", err=True)
        return results

    def _evaluate(
        self, rows: Sequence[EvalRow], texts: Mapping[str, str], phase: str, step: int | None = None
    ) -> list[Scored]:
        """Run rows with texts. Raises: RolloutError when most rollouts have no score."""
        opened, settings = self._opened, self._settings
        config = evaluation_config(
            max_concurrent=settings.concurrency,
            rollout_timeout_s=settings.timeout_s,
            sampling_params=settings.sampling_params,
            **{name: getattr(settings, name) for name in JudgeSettings.model_fields},
        )
        overrides = {TEXTS_FIELD: dict(texts)}
        requests = [GroupRequest(input_id=row.input_id, payload=row.payload, overrides=overrides) for row in rows]
        found: dict[int, Group] = {}
        shared: dict[str, Any] = {"client": opened.client, "gateway": opened.gateway}
        collect(requests, found.__setitem__, config=config, recording=opened.recording.at(phase, step), **shared)
        groups = [found[place] for place in range(len(rows))]
        cost = summarize_groups(groups).judge
        self._count(rollouts=len(rows), judge_calls=cost.get("calls", 0), judge_usd=cost.get("cost", 0))
        rollouts = [group.rollouts[0] for group in groups]
        items = [item_of(rollout, place, config) for place, rollout in enumerate(rollouts)]
        dialogues = [getattr(rollout.capture, "dialogue", None) for rollout in rollouts]
        results = [_scored(row, i, dialogue) for row, i, dialogue in zip(rows, items, dialogues, strict=True)]
        if 2 * sum(r.score is None for r in results) > len(results):
            raise RolloutError(f"no score for most of {len(rows)} rollouts; --resume continues. {most_frequent(items)}")
        return results


def _scored(row: EvalRow, item: BatchItem, dialogue: Sequence[Mapping[str, Any]] | None) -> Scored:
    """Return a rollout with the parts of it that the reflection model sees."""
    score, record = score_of(item), item.result or {}
    words = [f"The reward is {score}.", item.error, record.get("feedback"), record.get("judge")]
    shown = {
        "Inputs": json.dumps(redact(row.payload), ensure_ascii=False),
        "Generated Outputs": transcript(dialogue_of(dialogue, record)),
        "Feedback": "\n".join(str(part) for part in words if part),
    }
    return Scored(item=item, score=score, shown={heading: cut(text, SHOWN) for heading, text in shown.items()})


def _report(facts: Mapping[str, Any]) -> str:
    """Return the result as text."""
    gain, spent = facts["gain"], facts["spent"]
    usd = f", ${spent['usd']:.2f}" if spent["usd"] else ""
    counts = f"{spent['rollouts']} rollouts, {spent['reflections']} reflections{usd}"
    if gain is None:
        return f"the search found no better text ({counts}): the agent keeps its own"
    means = [
        f"reward {s['mean']:.4f} (95 % interval {s['low']:.4f} to {s['high']:.4f}) {when}"
        for when, s in (("before", facts["before"]), ("after", facts["after"]))
    ]
    return "\n".join([*means, f"Verdict: {gain['text']}", counts, f"put {FILE} next to the agent's code"])
