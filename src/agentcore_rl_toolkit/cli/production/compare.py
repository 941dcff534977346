"""`agentcore-rl compare`: two models or evaluations over the same inputs, as paired differences."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from ...errors import ConfigError
from ..models import WORDS, model_folder
from ..options import AGENT, ENV_FILE, as_json, with_agent_as_is, with_judge, with_sessions
from ..output.commands import nearby
from ..output.terminal import visible

FILE = click.Path(path_type=Path, exists=True, dir_okay=False)
FOLDER = click.Path(path_type=Path, file_okay=False)
POSITIVE = click.FloatRange(min=0, min_open=True)
SETTINGS = "compared.json"  # written into the folder of a side that this command evaluates
MEASURED, JUDGE = ("timeout", "sampling_params", "score", "judge"), ("judge_url", "judge_model", "judge_weight")
SHOWN = 5  # inputs that got better, and worse, on the screen; all are in compare.json


@dataclasses.dataclass(frozen=True, kw_only=True)
class Side:
    """A side: its name, the folder of its evaluation, and the options with which `eval` makes it (None if it exists)."""

    name: str
    folder: Path
    options: tuple[str, ...] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Results:
    """The measurements of an evaluation. Keys of maps are inputs.

    Attributes:
        keys: the digest of an input's payload, None if it was not kept. It has the inputs without a reward, too.
        scores: mean reward of an input's rollouts; failures of the agent and the policy are 0.
        rollouts: number of rollouts.
        failed: rollouts that did not end ok, by their outcome.
        seconds: duration of each rollout.
        tokens: sampled tokens of each rollout. Empty if no gateway recorded them.
        wall_s: time from the first rollout's start to the last one's end.
    """

    keys: Mapping[str, str | None]
    scores: Mapping[str, float]
    rollouts: int
    failed: Mapping[str, int]
    seconds: Sequence[float]
    tokens: Sequence[int]
    wall_s: float

    def facts(self, shared: Collection[str]) -> dict[str, Any]:
        """Return the numbers as they are written to compare.json. The reward is that of the inputs that both sides share."""
        from ...stats.intervals import interval

        scores = [self.scores[name] for name in shared]
        low, high = interval(scores)
        return {
            "rollouts": self.rollouts,
            "failed": dict(self.failed),
            "reward": statistics.fmean(scores) if scores else None,
            "low": low,
            "high": high,
            "seconds_median": statistics.median(self.seconds) if self.seconds else None,
            "seconds_p90": _quantile(self.seconds, 0.9),
            "sampled_tokens_mean": statistics.fmean(self.tokens) if self.tokens else None,
        }


@click.command()
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@click.option("--data", type=FILE, help="As for `eval`.")
@click.option("--agent", metavar=f"ARN|{AGENT}", help="The agent, as for `eval`.")
@click.option("--bucket", help="As for `eval`.")
@click.option("--repeat", default=1, show_default=True, type=click.IntRange(min=1), help="Rollouts per input and side.")
@click.option("--limit", type=click.IntRange(min=1), help="The number of lines to take. [default: all]")
@click.option("--concurrency", default=16, show_default=True, type=click.IntRange(min=1), help="Rollouts at a time.")
@click.option(
    "--timeout",
    default=900.0,
    show_default=True,
    type=click.FloatRange(min=0, min_open=True),
    help="Seconds per rollout.",
)
@click.option(
    "--sampling-params", metavar="JSON", help="Sampling parameters for the agent, e.g. '{\"temperature\": 0}'."
)
@click.option(
    "--at-least",
    type=float,
    metavar="DIFFERENCE",
    help="Exit with 1 unless the whole interval of B - A is at or above this, e.g. -0.02, and every input counts.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder of the results. [default: runs/compare-DATA]",
)
@click.option("--resume", is_flag=True, help="Continue an interrupted comparison in --out.")
@with_judge
@with_agent_as_is
@with_sessions
@as_json
def command(a: str, b: str, **options: Any) -> None:
    """Compare two models on the same inputs: the paired difference of their rewards, with its interval and p value.

    A and B are each one of these: the folder of a training run, a model (a folder, hub name or GGUF file), the address of a
    model as URL#MODEL_ID, or the folder of an earlier evaluation. For two evaluations nothing is run, and --data is not needed.
    An address gets the key AGENTCORE_RL_MODEL_API_KEY.

    Exit code: 0; 1 if --at-least does not hold; 2 on a wrong option.

    \b
    Example:
        agentcore-rl compare Qwen/Qwen3-4B runs/refund --agent agent.py --data eval.jsonl --repeat 4
        agentcore-rl compare runs/eval-old runs/eval-new --at-least -0.02
    """
    from ...client.evaluation import read_rows
    from ...runs.folder import make_folder
    from ...stats.differences import difference

    out = options["out"]
    sides = [_side(value, name, Path()) for value, name in ((a, "a"), (b, "b"))]
    inputs: list[str] | None = None
    if any(side.options is not None for side in sides):
        if options["data"] is None:
            raise ConfigError("--data is needed: its inputs run with each side that is not an earlier evaluation")
        if out is None and options["resume"]:
            raise ConfigError("--resume needs --out, the folder of the interrupted comparison")
        inputs = [row.input_id for row in read_rows(options["data"])][: options["limit"]]
        out = (out or make_folder(Path("runs").resolve(), f"compare-{options['data'].stem}")).resolve()
        out.mkdir(parents=True, exist_ok=True)
        sides = [
            dataclasses.replace(side, folder=out / side.folder) if side.options is not None else side for side in sides
        ]
    kept = [(side, _settings(side, options)) for side in sides if side.options is not None]
    for side, settings in kept:
        _check_kept(side.folder, settings)
    for side, settings in kept:
        if not _complete(side.folder, len(inputs or ()), options["repeat"]):
            side.folder.mkdir(exist_ok=True)
            (side.folder / SETTINGS).write_text(json.dumps(settings, indent=2) + "\n")
            _evaluate(side, options)
    results = [read_results(side.folder, inputs) for side in sides]
    _check_payloads(*results)
    change = difference(results[0].scores, results[1].scores)
    if not change.inputs:
        raise ConfigError("A and B have no common input with a reward on both sides")
    shared = [name for name in results[0].scores if name in results[1].scores]
    wanted = set(inputs or ()).union(*(result.keys for result in results))
    facts = {
        "sides": [
            {"name": side.name, "folder": str(side.folder), **result.facts(shared), **_dollars(side.folder, result)}
            for side, result in zip(sides, results, strict=True)
        ],
        "difference": change.as_facts(),
        "unpaired": len(wanted) - len(shared),
        "changed": _changed(results[0].scores, results[1].scores),
    }
    if out is not None:
        (out / "compare.json").write_text(json.dumps(facts, indent=2) + "\n")
    click.echo(json.dumps(facts, indent=2) if options["as_json"] else visible("\n".join(_lines(facts))))
    least = options["at_least"]
    if least is not None:
        assert change.low is not None
        holds = change.low >= least and not facts["unpaired"]
        click.echo(f"B - A is at least {least:+g}: {'yes' if holds else 'not shown'}", err=True)
        if not holds:
            sys.exit(1)


def _side(value: str, name: str, out: Path) -> Side:
    """Parse a side. Raises: ConfigError."""
    from ...runs import read_config
    from ...runs.folder import is_run

    if value.startswith(("http://", "https://")):
        url, _, model_id = value.partition("#")
        if not model_id:
            raise ConfigError(f"{value} names no model: write URL#MODEL_ID, e.g. {value}#my-model")
        return Side(name=value, folder=out / name, options=("--base-url", url, "--model-id", model_id))
    path = Path(value)
    if path.is_dir() and is_run(path) and read_config(path).get("kind") == "eval":
        return Side(name=value, folder=path, options=None)
    try:
        return Side(name=value, folder=out / name, options=("--model", str(model_folder(value))))
    except ConfigError as e:
        raise ConfigError(f"{value} is neither an evaluation nor a model ({WORDS}) or URL#MODEL_ID: {e}") from e


def _settings(side: Side, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an evaluation measures: the model, the data and the agent as they are now, and the options of the rollouts."""
    from ...isolation.project import Project
    from ..training.stack import find_agent

    assert side.options is not None
    agent, model = options["agent"], Path(side.options[1])
    file = Path() if agent is None or agent.startswith("arn:") else find_agent(agent).resolve()
    made_of: dict[str, Any] = {"model": [*side.options, *(_stamps(model) if model.is_dir() else ())]}
    made_of["data"] = hashlib.sha256(options["data"].read_bytes()).hexdigest()
    made_of["agent"] = [agent, Project.of(file).digest() if file.is_file() else None]
    return made_of | {name: options[name] for name in (*MEASURED, *JUDGE)}


def _stamps(model: Path) -> list[str]:
    """Return name, size and time of each file of a model. Weights are too large to be read for every comparison."""
    files = sorted(file for file in model.iterdir() if file.is_file())
    return [f"{file.name} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in files]


def _check_kept(folder: Path, settings: Mapping[str, Any]) -> None:
    """Raise ConfigError if the folder holds an evaluation that measured something else."""
    from ...runs.folder import read_object

    if not (folder / "ledger.jsonl").exists() and not (folder / "summary.json").exists():
        return
    kept = read_object(folder / SETTINGS)
    for name, value in settings.items():
        if name not in kept or kept[name] != value:
            option = name.replace("_", "-")
            other = f"of another {name}" if name in ("model", "agent") else f"with another --{option}"
            raise ConfigError(f"{nearby(folder)} is an evaluation {other}: choose another --out")


def _check_payloads(a: Results, b: Results) -> None:
    """Raise ConfigError if one id stands for different inputs."""
    for name, key in a.keys.items():
        other = b.keys.get(name)
        if None not in (key, other) and key != other:
            raise ConfigError(
                f"the input {name} has another payload in B than in A: compare evaluations of the same data"
            )


def _complete(folder: Path, inputs: int, repeat: int) -> bool:
    """Return True if the evaluation in the folder has all its rollouts."""
    from ...runs import read_config
    from ...runs.folder import read_object

    summary = read_object(folder / "summary.json")
    wanted = (inputs * repeat, inputs, repeat)
    return (summary.get("rollouts"), summary.get("inputs"), read_config(folder).get("repeat")) == wanted


def _evaluate(side: Side, options: Mapping[str, Any]) -> None:
    """Run `agentcore-rl eval` for one side. Its progress is shown, its summary is not."""
    assert side.options is not None
    words = [*side.options, "--data", str(options["data"]), "--out", str(side.folder)]
    for name in (*MEASURED, *JUDGE, "agent", "bucket", "repeat", "limit", "concurrency"):
        if options[name] is not None:
            words += [f"--{name.replace('_', '-')}", str(options[name])]
    for name in ("readable", "writable", "model_hosts", "policy_models"):
        words += [word for value in options[name] for word in (f"--{name.replace('_', '-').removesuffix('s')}", value)]
    env_file, from_file = click.get_current_context().meta.get(ENV_FILE, (None, ()))
    words += ["--env-file", str(env_file)] if env_file is not None else []
    variables = dict(word.partition("=")[::2] for word in options["session_env"][len(from_file) :])
    # Only names: values on a command line can be seen by every user of the machine.
    words += [word for name in variables for word in ("--session-env", name)]
    begun = (side.folder / "ledger.jsonl").exists()
    if begun and not options["resume"]:
        raise ConfigError(f"{nearby(side.folder)} holds a run. Continue with --resume, or choose another --out")
    click.echo(visible(f"{side.folder.name.upper()}: {side.name}"), err=True)
    command = [sys.executable, "-m", "agentcore_rl_toolkit.cli", "eval", *words, *(["--resume"] if begun else [])]
    given = {name: value for name, value in variables.items() if value}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env={**os.environ, **given})
    while process.poll() is None:
        with contextlib.suppress(KeyboardInterrupt):  # it received the signal, too: it keeps finished rollouts and ends
            process.wait()
    if process.returncode not in (0, 1) or not (side.folder / "summary.json").exists():
        sys.exit(process.returncode or 1)


def read_results(folder: Path, inputs: Iterable[str] | None = None) -> Results:
    """Read the rollouts of an evaluation, of these inputs only if some are given. Raises: ConfigError."""
    from ...runs import Query, RunReader

    wanted = None if inputs is None else set(inputs)
    with RunReader(folder) as reader:
        rows = reader.rollouts(Query(), limit=reader.count())
    rows = [row for row in rows if wanted is None or row["grp"] in wanted]
    ends = [row["ended_s"] for row in rows if row["ended_s"] is not None]
    starts = [row["ended_s"] - (row["elapsed_s"] or 0.0) for row in rows if row["ended_s"] is not None]
    scores: dict[str, list[float]] = {}
    for row in rows:
        if row["score"] is not None:
            scores.setdefault(row["grp"], []).append(row["score"])
    return Results(
        keys={row["grp"]: row["input_key"] for row in rows},
        scores={name: statistics.fmean(each) for name, each in scores.items()},
        rollouts=len(rows),
        failed=Counter(row["outcome"] for row in rows if row["outcome"] != "ok"),
        seconds=[row["elapsed_s"] for row in rows if row["elapsed_s"] is not None],
        tokens=[row["sampled_tokens"] for row in rows if row["sampled_tokens"]],
        wall_s=max(ends) - min(starts) if ends else 0.0,
    )


def _dollars(folder: Path, results: Results) -> dict[str, float | None]:
    """Return the price of 1,000 rollouts: of an agent's sessions on AgentCore, and of a model's endpoint on SageMaker.

    The endpoint counts for the time that the side took. None: unknown, as for what runs on this machine.
    """
    from ...deploy import cost
    from ...deploy.models.sagemaker import RUNTIME_URL, dollars_per_hour_of
    from ...runs import read_config

    config = read_config(folder)
    agent, url = str(config.get("agent")), str(config.get("base_url"))
    hosts = rf"(?:{re.escape(os.environ.get(RUNTIME_URL) or '-')}|https://runtime\.sagemaker\.([a-z0-9-]+)\.[^/]+)"
    endpoint = re.match(rf"{hosts}/endpoints/([^/]+)/", url)
    per_hour = None if endpoint is None else dollars_per_hour_of(endpoint[2], endpoint[1])
    sessions = cost.dollars(1000, minutes=statistics.fmean(results.seconds) / 60) if results.seconds else None
    model = None if per_hour is None else per_hour * results.wall_s / 3600 / results.rollouts * 1000
    return {"agent_dollars": sessions if agent.startswith("arn:") else None, "model_dollars": model}


def _changed(a: Mapping[str, float], b: Mapping[str, float]) -> list[dict[str, Any]]:
    """Return the inputs with different rewards, the largest changes first."""
    changed = [{"input": name, "a": a[name], "b": b[name]} for name in a if name in b and a[name] != b[name]]
    return sorted(changed, key=lambda each: (-abs(each["b"] - each["a"]), each["input"]))


def _quantile(values: Sequence[float], share: float) -> float | None:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


def _lines(facts: Mapping[str, Any]) -> list[str]:
    """Return the report for people."""
    a, b = facts["sides"]
    change = facts["difference"]
    table = [
        ("", f"A: {_short(a['name'])}", f"B: {_short(b['name'])}"),
        ("rollouts", *(str(side["rollouts"]) for side in (a, b))),
        ("reward", *(_number(side["reward"]) for side in (a, b))),
        ("95 % interval", *(f"{_number(side['low'])} to {_number(side['high'])}" for side in (a, b))),
        ("seconds, median", *(_number(side["seconds_median"]) for side in (a, b))),
        ("seconds, 90 %", *(_number(side["seconds_p90"]) for side in (a, b))),
        ("sampled tokens", *(_number(side["sampled_tokens_mean"]) for side in (a, b))),
    ]
    for heading, key in (("agent, $ for 1,000", "agent_dollars"), ("model, $ for 1,000", "model_dollars")):
        if any(side[key] is not None for side in (a, b)):
            table.append((heading, *(_number(side[key]) for side in (a, b))))
    if any(side["failed"] for side in (a, b)):
        table.append(("failed", *(", ".join(f"{n} {o}" for o, n in side["failed"].items()) or "0" for side in (a, b))))
    widths = [max(len(row[place]) for row in table) for place in range(3)]
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
        lines.append(f"Left out, because a side has no reward for it: {_inputs(facts['unpaired'])}.")
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
