"""`agentcore-rl compare`: two models or evaluations over the same inputs, as paired differences."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import statistics
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from ...errors import ConfigError
from ...runs.folder import read_object
from ..eval import command as evaluate
from ..eval import experiment, with_evaluation
from ..models import WORDS, model_folder
from ..options import as_json
from ..output.commands import nearby
from ..output.terminal import visible

BEGUN = "compared.json"  # the file of a folder in which a comparison has begun
MEANS = {
    "seconds, median": "seconds_median",
    "seconds, 90 %": "seconds_p90",
    "sampled tokens": "sampled_tokens_mean",
    "agent, $ for 1,000": "agent_dollars",
    "model, $ for 1,000": "model_dollars",
}
Rollout = dict[str, Any]
SHOWN = 5  # inputs that got better, and worse, on the screen; all are in compare.json


@dataclasses.dataclass(frozen=True, kw_only=True)
class Side:
    """A side: its name, the folder of its evaluation, and the options with which `eval` makes it (empty if it exists)."""

    name: str
    folder: Path
    options: Mapping[str, Any]


@click.command()
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@click.option(
    "--at-least",
    type=float,
    metavar="DIFFERENCE",
    help="Exit with 1 unless every input counts and the lower end of the interval of B - A is at least this, e.g. -0.02.",
)
@with_evaluation
@as_json
def command(a: str, b: str, **options: Any) -> None:
    """Compare two models on the same inputs. The result is the difference of their rewards, with its interval and p-value.

    A and B are each one of these: the folder of a training run, a model (a folder, hub name or GGUF file), the address of a
    model as URL#MODEL_ID, or the folder of an earlier evaluation. The comparison of two evaluations runs nothing and needs no
    --data. AGENTCORE_RL_MODEL_API_KEY is the key of an address.

    Exit code: 0; 1 if --at-least is not reached; 2 for a wrong option.

    \b
    Example:
        agentcore-rl compare Qwen/Qwen3-4B runs/refund --agent agent.py --data eval.jsonl --repeat 4
        agentcore-rl compare runs/eval-old runs/eval-new --at-least -0.02
    """
    from ...client.evaluation import read_rows
    from ...stats.differences import difference

    sides = [_side(value, name) for value, name in ((a, "a"), (b, "b"))]
    out: Path | None = options["out"]
    if any(side.options for side in sides):
        if options["data"] is None:
            raise ConfigError(
                "--data is missing: it has the inputs for A and B. Only the comparison of two earlier evaluations needs none"
            )
        _, out = experiment(options, "compare", BEGUN)
        given = {"A": a, "B": b, "agent": options["agent"], "data": str(options["data"])}
        if read_object(out / BEGUN) not in ({}, given):  # finished evaluations would be shown as those of others
            raise ConfigError(
                f"{nearby(out)} compares other models, or with another agent or data: choose another --out"
            )
        out.mkdir(parents=True, exist_ok=True)
        (out / BEGUN).write_text(json.dumps(given) + "\n")
        inputs = len({row.input_id for row in read_rows(options["data"])[: options["limit"]]})
        sides = [dataclasses.replace(side, folder=out / side.folder) if side.options else side for side in sides]
        for side in (side for side in sides if side.options):
            _evaluate(side, options, inputs)
    results = [read_results(side.folder) for side in sides]
    (_, before), (_, after) = results
    ours, theirs = ({each["grp"]: each["input_key"] for each in rollouts} for rollouts, _ in results)
    if other := [name for name, key in ours.items() if None not in (key, theirs.get(name)) and key != theirs[name]]:
        raise ConfigError(
            f"the input {other[0]} has another payload in B than in A: compare evaluations of the same data"
        )
    change = difference(before, after)
    if not change["inputs"]:
        raise ConfigError("A and B have no common input that has a reward in both: nothing can be compared")
    shared = [name for name in before if name in after]
    changed: list[dict[str, Any]] = [
        {"input": k, "a": before[k], "b": after[k]} for k in shared if before[k] != after[k]
    ]
    facts = {
        "sides": [_facts(side, *result, shared) for side, result in zip(sides, results, strict=True)],
        "difference": change,
        "unpaired": len({*ours, *theirs}) - len(shared),
        "changed": sorted(changed, key=lambda each: (-abs(each["b"] - each["a"]), each["input"])),
    }
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "compare.json").write_text(json.dumps(facts, indent=2) + "\n")
    click.echo(json.dumps(facts, indent=2) if options["as_json"] else visible("\n".join(_lines(facts))))
    least = options["at_least"]
    if least is not None:
        holds = change["low"] >= least and not facts["unpaired"]
        click.echo(f"B - A is at least {least:+g}: {'yes' if holds else 'not shown'}", err=True)
        if not holds:
            sys.exit(1)


def _side(value: str, name: str) -> Side:
    """Parse a side, whose evaluation gets a folder of this name if it has none. Raises: ConfigError."""
    from ...runs import read_config
    from ...runs.folder import is_run

    if value.startswith(("http://", "https://")):
        url, _, model_id = value.partition("#")
        if not model_id:
            raise ConfigError(f"{value} lacks the name of the model: write URL#MODEL_ID, such as {value}#my-model")
        return Side(name=value, folder=Path(name), options={"base_url": url, "model_id": model_id})
    path = Path(value)
    if path.is_dir() and is_run(path) and read_config(path).get("kind") == "eval":
        return Side(name=value, folder=path, options={})
    try:
        return Side(name=value, folder=Path(name), options={"model": model_folder(value)})
    except ConfigError as e:
        raise ConfigError(f"{value} is not an evaluation, a model ({WORDS}) or URL#MODEL_ID: {e}") from e


def _evaluate(side: Side, options: Mapping[str, Any], inputs: int) -> None:
    """Run `agentcore-rl eval` for one side, unless it has all its rollouts. Exit if it does not come to its end.

    Its progress is shown, its summary is not.
    """

    def complete() -> bool:
        summary = read_object(side.folder / "summary.json")
        return (summary.get("rollouts"), summary.get("inputs")) == (inputs * options["repeat"], inputs)

    if complete():
        return
    given = {p.name: options[p.name] for p in evaluate.params if p.name in options} | dict(side.options)
    given |= {"out": side.folder, "resume": (side.folder / "rollouts.sqlite").exists(), "as_json": False}
    click.echo(visible(f"{side.folder.name.upper()}: {side.name}"), err=True)
    code, variables = 0, dict(os.environ)
    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
        try:
            click.get_current_context().invoke(evaluate, **given)
        except SystemExit as e:  # 1: rollouts failed, which is a result
            code = int(e.code or 0)
        finally:  # local services set other credentials
            os.environ.clear()
            os.environ.update(variables)
    if not complete():
        sys.exit(code or 1)


def read_results(folder: Path) -> tuple[list[Rollout], dict[str, float]]:
    """Read an evaluation. Returns its rollouts, and the mean reward of each input. Raises: ConfigError.

    Failures of the agent and the policy are 0.
    """
    from ...runs import Query, RunReader

    with RunReader(folder) as reader:
        rows = reader.rollouts(Query(), limit=reader.count())
    scores: dict[str, list[float]] = {}
    for row in rows:
        if row["score"] is not None:
            scores.setdefault(row["grp"], []).append(row["score"])
    # Equal means are equal numbers.
    return rows, {name: round(statistics.fmean(each), 12) for name, each in scores.items()}


def _facts(side: Side, rollouts: list[Rollout], means: Mapping[str, float], shared: list[str]) -> dict[str, Any]:
    """Return the numbers of a side as they are written to compare.json.

    The reward is that of the inputs that both sides share. The dollars are the price of 1,000 rollouts: of an agent's sessions on
    AgentCore, and of a model's endpoint on SageMaker for the time that the side took. None: unknown, as for what runs on this
    machine.
    """
    from ...deploy import cost
    from ...deploy.models.sagemaker import dollars_per_hour_at
    from ...runs import read_config
    from ...stats.intervals import interval

    config, scores = read_config(side.folder), [means[name] for name in shared]
    seconds = sorted(rollout["elapsed_s"] for rollout in rollouts if rollout["elapsed_s"] is not None)
    tokens = [rollout["sampled_tokens"] for rollout in rollouts if rollout["sampled_tokens"]]
    low, high = interval(scores)
    deployed = str(config.get("agent")).startswith("arn:") and seconds
    hours = read_object(side.folder / "summary.json").get("elapsed_s", 0.0) / 3600
    per_hour = dollars_per_hour_at(str(config.get("base_url")))
    # A scorer may fail after a rollout that ended ok.
    ends = (each["cause"] if each["outcome"] == "ok" else each["outcome"] for each in rollouts)
    return {
        "name": side.name,
        "folder": str(side.folder),
        "rollouts": len(rollouts),
        "failed": dict(Counter(filter(None, ends))),
        "reward": statistics.fmean(scores),
        "low": low,
        "high": high,
        "seconds_median": statistics.median(seconds) if seconds else None,
        "seconds_p90": seconds[int(0.9 * len(seconds))] if seconds else None,
        "sampled_tokens_mean": statistics.fmean(tokens) if tokens else None,
        "agent_dollars": cost.dollars(1000, statistics.fmean(seconds) / 60) if deployed else None,
        "model_dollars": None if per_hour is None else per_hour * hours / len(rollouts) * 1000,
    }


def _lines(facts: Mapping[str, Any]) -> list[str]:
    a, b = facts["sides"]
    change = facts["difference"]
    table: list[tuple[str, ...]] = [("", f"A: {_short(a['name'])}", f"B: {_short(b['name'])}")]
    table.append(("rollouts", f"{a['rollouts']}", f"{b['rollouts']}"))
    table.append(("reward", _number(a["reward"]), _number(b["reward"])))
    table.append(("95 % interval", *(f"{_number(side['low'])} to {_number(side['high'])}" for side in (a, b))))
    for heading, key in MEANS.items():
        if not key.endswith("dollars") or any(side[key] is not None for side in (a, b)):
            table.append((heading, _number(a[key]), _number(b[key])))
    if a["failed"] or b["failed"]:
        table.append(("failed", *(", ".join(f"{n} {o}" for o, n in side["failed"].items()) or "0" for side in (a, b))))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
    equal = change["inputs"] - change["better"] - change["worse"]
    lines += [
        "",
        f"B - A: {change['mean']:+.3f} over {_inputs(change['inputs'])} (95 % interval {change['low']:+.3f} to "
        f"{change['high']:+.3f}), p = {change['p']:.2g}.",
        f"B is better on {_inputs(change['better'])}, worse on {change['worse']}, and equal on {equal}.",
    ]
    if change["needed"] is not None and change["needed"] > change["inputs"]:
        lines.append(f"About {change['needed']} inputs are needed to show a difference of this size.")
    if facts["unpaired"]:
        lines.append(f"Left out, because A or B has no reward for them: {_inputs(facts['unpaired'])}.")
    for heading, sign in (("Better", 1), ("Worse", -1)):
        found = [each for each in facts["changed"] if (each["b"] - each["a"]) * sign > 0]
        shown = ", ".join(f"{each['input']} ({each['a']:g} to {each['b']:g})" for each in found[:SHOWN])
        if found:
            more = f", and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
            lines.append(f"{heading}: {shown}{more}")
    return lines


def _inputs(count: int) -> str:
    return f"{count} input" + ("s" if count != 1 else "")


def _short(name: str) -> str:
    return name if len(name) <= 40 else f"...{name[-37:]}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
