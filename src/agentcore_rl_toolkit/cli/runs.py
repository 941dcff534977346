"""`agentcore-rl runs`: list runs, read one in the terminal."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from ..errors import ConfigError
from ..runs import Query, RunReader, TokenSequence, demonstrations, diagnose, find_run, find_runs
from ..runs.demonstrations import write_rows
from ..runs.folder import is_run, read_config, status
from ..runs.frames import rollout_rows
from ..view.data import as_json as plain_json
from ..view.data import head
from . import in_flight
from .options import as_json, new_file, with_force
from .output.terminal import dialogue_lines, visible

BARS = "▁▂▃▄▅▆▇█"
PARTS = ("before", "after", "eval", "train")


@click.group()
def group() -> None:
    """Show runs of training and evaluation, and export rollouts. `agentcore-rl view` shows runs in a browser."""


@group.command("list", short_help="List runs, the newest first.")
@click.argument("folder", default=".", type=click.Path(path_type=Path, exists=True, file_okay=False))
@as_json
def list_runs(folder: Path, as_json: bool) -> None:
    """List the runs in FOLDER and in its folder runs/, the newest first."""
    found = [head(path) for path in find_runs(folder)]
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    if not found:
        click.echo(f"there is no run in {folder.resolve()}, nor in its runs/", err=True)
    width = max((len(run["name"]) for run in found), default=0)
    wide = max(map(len, map(_state, found)), default=0)
    for run in found:
        counts = f"{_state(run):<{wide}}"
        if run["rollouts"] is not None:
            between = "" if run["interval"] is None else " ({:.3f} to {:.3f})".format(*run["interval"])
            counts += (
                f"  {run['rollouts']:>7} rollouts  reward {_number(run['reward'])}{between}  {bars(run['rewards'])}"
            )
        click.echo(visible(f"{run['name']:<{width}}  {counts}  {run['problem'] or ''}").rstrip())


def _state(run: Mapping[str, Any]) -> str:
    """Return the status of a run without the reason of a failure."""
    return str(run["status"]).split(":")[0]


group.add_command(list_runs, "ls")


@group.command(short_help="Show a run: its steps, or some of its rollouts.")
@click.argument("run", required=False)
@click.argument("part", required=False)
@click.option("--worst", type=click.IntRange(min=1), help="Show only this number of rollouts with the lowest rewards.")
@click.option("--rollout", "name", metavar="ID", help="Show one rollout, by its number or session id.")
@click.option("--in-flight", "running", is_flag=True, help="Show the running rollouts, and what each waits for.")
@as_json
def show(
    run: str | None,
    part: str | None,
    worst: int | None,
    name: str | None,
    running: bool,
    as_json: bool,
) -> None:
    """Show the steps of RUN, and reasons why it does not learn. RUN is a folder, or a name under runs/ [default: the newest run].

    With PART, show the rollouts of a training step (its number) or of an evaluation (before, after, eval). With --worst, show
    only the worst of these rollouts, or the worst of the training without PART. Trained text is between « and ».

    If a run hangs, --in-flight shows the stage of each rollout, its time in this stage, its deadline, and what it waits for.

    \b
    Example:
        agentcore-rl runs show
        agentcore-rl runs show after --worst 3
    """
    known = run is not None and any(is_run(path / run) for path in (Path(), Path("runs")))
    if part is None and run is not None and (run in PARTS or run.isdecimal()) and not known:
        run, part = None, run
    with RunReader(find_run(run)) as reader:
        if running:
            found = in_flight.facts(reader)
            click.echo(json.dumps(found, indent=2) if as_json else visible("\n".join(in_flight.lines(found))))
            return
        if name is not None:
            one = reader.find(name)
            if one is None:
                raise ConfigError(f"{reader.folder} has no rollout {name}")
            chosen = [one]
        elif worst is not None or part is not None:
            chosen = _chosen(reader, part, worst)
        else:
            steps = reader.steps()
            facts = {
                "name": reader.name,
                "status": status(reader.folder),
                "config": read_config(reader.folder),
                "diagnosis": [vars(finding) for finding in diagnose(reader, steps)],
                "steps": steps,
                "jobs": list({e["job"]: e for e in reader.metrics() if e.get("event") == "job"}.values()),
                "not_kept": reader.not_kept(),
            }
            click.echo(
                json.dumps(json.loads(plain_json(facts)), indent=2) if as_json else visible("\n".join(_overview(facts)))
            )
            return
        shown = (reader.rollout(rollout) or {} for rollout in chosen)
        if as_json:
            click.echo(plain_json([_plain(rollout) for rollout in shown]))
            return
        whole = worst is not None or name is not None
        for rollout in shown:
            click.echo(_line(rollout))
            if whole:
                for line in _read_out(reader, rollout):
                    click.echo(line)


@group.command(short_help="Export rollouts for supervised training or as rows, or filter a data file.")
@click.argument("run", required=False)
@click.option(
    "--min-reward", type=float, metavar="X", help="Write rollouts with at least this reward. Required without --rows."
)
@click.option(
    "--best-of-group", is_flag=True, help="Write only the best rollout of each group, if its reward is above 0."
)
@click.option(
    "--rows",
    is_flag=False,
    flag_value="",
    metavar="[DATA]",
    help="Write every rollout as a row. With a data file: write its rows that --pass-rate selects.",
)
@click.option(
    "--pass-rate", metavar="LOW:HIGH", help="With --rows DATA: keep the inputs with this share of solved rollouts."
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File, .jsonl or .parquet. [default: sft.jsonl; rows.jsonl with --rows]",
)
@with_force
def export(
    run: str | None,
    min_reward: float | None,
    best_of_group: bool,
    rows: str | None,
    pass_rate: str | None,
    out: Path | None,
    force: bool,
) -> None:
    """Write the token sequences of good training rollouts of RUN, with a mask of the trained tokens.

    A rollout is written if it ended ok, has no reply that was cut off, and has no tool call that does not parse. Without
    --min-reward, an error shows the rewards of the run. `agentcore-rl sft --from RUN` trains on the same rollouts without a file.

    With --rows, each rollout becomes a row of numbers for a notebook: outcome, rewards, tokens, times.

    With --rows DATA --pass-rate 0.1:0.9, the command writes the rows of DATA that were solved in 10 to 90 % of their rollouts
    in RUN. A rollout solves its input with a reward of 1 or more. Inputs that are always or never solved teach nothing.
    """
    if rows is None and pass_rate is None:
        target = new_file(out or Path("sft.jsonl"), force=force)
        chosen: Any = {"min_reward": min_reward, "best_of_group": best_of_group}
        found = demonstrations(find_run(run), **chosen, report=lambda text: click.echo(visible(text)))
        click.echo(visible(f"{write_rows(found, target)} sequences written to {target}"))
        return
    if bool(rows) is not (pass_rate is not None) or min_reward is not None or best_of_group:
        raise ConfigError(
            "--rows DATA and --pass-rate LOW:HIGH go together, without --min-reward and --best-of-group; "
            "--rows without DATA writes rollouts"
        )
    target = new_file(out or Path("rows.jsonl"), force=force)
    if pass_rate is not None:
        click.echo(visible(_filter(find_run(run), Path(str(rows)), pass_rate, target)))
        return
    with RunReader(find_run(run)) as reader:
        click.echo(visible(f"{write_rows(rollout_rows(reader), target)} rollouts written to {target}"))


def _filter(run: Path, data: Path, pass_rate: str, target: Path) -> str:
    """Write the rows of a pass rate. Returns a report. Raises: ConfigError."""
    from ..backends.collection.recording import input_key
    from ..client.data import read_rows

    try:
        low, high = map(float, pass_rate.split(":"))
    except ValueError as e:
        raise ConfigError(f"--pass-rate is LOW:HIGH, such as 0.1:0.9, got {pass_rate!r}") from e
    with RunReader(run) as reader:
        rates = {key: entry["rate"] for key, entry in reader.inputs(Query()).items() if entry["scores"]}
    rows = read_rows(data)
    known = [(row, rates[key]) for row in rows if (key := input_key(row)) in rates]
    kept = [row for row, rate in known if low <= rate <= high]
    if not kept:
        raise ConfigError(
            f"no row of {data} has a pass rate from {low:g} to {high:g} in {run}; {len(known)} rows were run"
        )
    target.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in kept))
    counts = f"{sum(rate < low for _, rate in known)} are below, {sum(rate > high for _, rate in known)} above"
    return f"{len(kept)} of {len(rows)} rows written to {target}; {counts}, {len(rows) - len(known)} were not run"


def _chosen(reader: RunReader, part: str | None, worst: int | None) -> list[int]:
    """Return the ids of a part's rollouts, or of the worst of them. Without a part: those of the training, or all."""
    if part is not None:
        where: dict[str, Any] = {"phase": "train", "number": int(part)} if part.isdecimal() else {"phase": part}
    else:
        where = {"phase": "train"} if reader.count(Query(phase="train")) else {}
    found = reader.ids(Query(**where, sort="id" if worst is None else "score"), limit=worst or -1)
    if part is not None and not found:
        places = ", ".join(
            dict.fromkeys(str(step["number"]) if step["phase"] == "train" else step["phase"] for step in reader.steps())
        )
        raise ConfigError(f"{reader.name} has no rollout of {part!r}; it has those of {places or 'no step'}")
    return found


def _overview(run: Mapping[str, Any]) -> Iterator[str]:
    yield f"{run['name']}   {run['status']}   {bars([s['reward'] for s in run['steps'] if s['phase'] == 'train'])}"
    for finding in run["diagnosis"]:
        yield f"! {finding['text']}\n  {finding['advice']}"
    columns = ("rollouts", "reward", "spread", "usable", "differ", "tokens", "gap")
    yield f"{'':10}{''.join(name.rjust(9) for name in columns)}  outcomes"
    for s in run["steps"]:
        ends = " ".join(f"{n} {o}" for o, n in s["outcomes"].items())
        ends += f" ({', '.join(f'{n} {c}' for c, n in s['causes'].items())})" if s["causes"] else ""
        gap = s["gap_max"]  # may be a millionth
        cells = (
            *(s["rollouts"], _number(s["reward"]), _number(s["reward_spread"]), s["usable"], s["groups_differ"] or 0),
            *(_number(s["tokens_mean"], 0), f"{gap:.1e}" if gap and abs(gap) < 0.001 else _number(gap)),
        )
        yield f"{s['at']:10}{''.join(str(cell).rjust(9) for cell in cells)}  {ends}"
    for job in run["jobs"]:  # SageMaker's, as they were last read
        facts = ({k: v} for k, v in job.items() if k not in ("event", "job", "status"))
        yield f"{job['job']}  {job['status']}  {'  '.join(map(json.dumps, facts))}"
    if run["not_kept"]:
        yield f"not kept: {run['not_kept']} rollouts"


def _line(row: Mapping[str, Any]) -> str:
    whose = f" ({row['cause']})" if row["cause"] else ""
    return visible(
        f"#{row['id']}  {row['at']}  {row['grp']}  {row['outcome']}{whose}  reward {_number(row['reward'])}  advantage "
        f"{_number(row['advantage'])}  {row['turns'] if row['turns'] is not None else '-'} turns  "
        f"{row['sampled_tokens'] if row['sampled_tokens'] is not None else '-'} tokens  {row['error'] or ''}"
    ).rstrip()


def _read_out(reader: RunReader, rollout: Mapping[str, Any]) -> Iterator[str]:
    if rollout["dialogue"]:
        yield from dialogue_lines(rollout["dialogue"])
    elif rollout["dialogue"] is None:
        yield "  (no dialogue: the rollout had no gateway, or it was not kept)"
    detail = rollout.get("detail") or {}
    if judge := (detail.get("reward_parts") or {}).get("judge"):
        yield visible(f"  the judge gave {_number(judge['score'])}: {judge['reason']}")
    trace = detail.get("traceback")
    if trace:
        yield visible(trace.rstrip())
    for number, encoded in enumerate(rollout["sequences"] or ()):
        sequence = TokenSequence.decoded(encoded)
        why = f", {sequence.branch_reason}" if sequence.branch_reason else ""
        why += f"; a side call: {sequence.side_call}" if sequence.side_call else ""
        known = [(lp, i) for i, lp in enumerate(sequence.logprobs or ()) if lp is not None and sequence.mask[i]]
        texts = reader.texts(sequence.ids)
        yield f"  sequence {number + 1}: {len(sequence.ids)} tokens, {sum(sequence.mask)} trained{why}"
        if known:
            logprob, place = min(known)
            yield visible(
                f"  least likely: {texts.get(sequence.ids[place], sequence.ids[place])!r} {logprob:.3f} at {place}"
            )
        yield visible(marked(sequence, texts))
    yield ""


def marked(sequence: TokenSequence, texts: Mapping[int, str]) -> str:
    """Return a sequence as text, trained parts between marks. A token without a text is its id."""
    pieces: list[str] = []
    inside = False
    for token, trained in zip(sequence.ids, sequence.mask, strict=True):
        if bool(trained) is not inside:
            pieces.append("«" if trained else "»")
            inside = bool(trained)
        pieces.append(texts.get(token, f"[{token}]"))
    return "".join(pieces) + ("»" if inside else "")


def bars(values: Sequence[float | None]) -> str:
    """Draw a curve of one line. A missing value is a blank."""
    known = [v for v in values if v is not None]
    low, high = min(known, default=0.0), max(known, default=1.0)
    low, high = min(low, 0.0), max(high, 1.0)
    places = [None if v is None else round((v - low) / (high - low) * (len(BARS) - 1)) for v in values[-60:]]
    return "".join(" " if place is None else BARS[place] for place in places)


def _plain(rollout: dict[str, Any]) -> dict[str, Any]:
    """Replace packed arrays with lists."""
    sequences = rollout.get("sequences")
    if sequences is None:
        return rollout
    return {**rollout, "sequences": [vars(TokenSequence.decoded(sequence)) for sequence in sequences]}


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
