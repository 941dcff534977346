"""`agentcore-rl harvest`: rows of a data set from production traffic."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...errors import ConfigError
from ..options import new_file, with_force
from ..output.commands import nearby

if TYPE_CHECKING:
    from ...traffic.rows import Invocation

FILE = click.Path(path_type=Path, dir_okay=False)
SESSION_S = 8 * 3600  # the longest life of a session on AgentCore
EVAL_SHARE = 0.2  # the share of users whose rows are held out
_UNITS = {"m": 60, "h": 3600, "d": 86400}


@click.command()
@click.argument("source", metavar="FILE|DIR|ARN|LOG_GROUP")
@click.option("--out", type=FILE, required=True, help="File for the rows, as JSON lines.")
@click.option("--eval-out", type=FILE, help="File for the rows of a fifth of the users, which are not in --out.")
@click.option(
    "--sft-out",
    type=FILE,
    help="File for the dialogues of the rows in --out. With --no-redact, dialogues of a gateway contain the sampled tokens. All "
    "others are messages without tokens.",
)
@click.option(
    "--field",
    "prompt_field",
    default="prompt",
    show_default=True,
    help="Field of the payload that gets the prompt, if the prompt is plain text.",
)
@click.option(
    "--user-attribute",
    default="session.id",
    show_default=True,
    metavar="ATTRIBUTE",
    help="Attribute of the spans that identifies the user. Sessions without it are left out.",
)
@click.option(
    "--since",
    default="7d",
    show_default=True,
    metavar="TIME",
    help="How far to read back in CloudWatch, such as 90m, 12h, 7d.",
)
@click.option(
    "--redact", "patterns", multiple=True, metavar="REGEX", help="Also redact matches of this pattern; repeatable."
)
@click.option("--no-redact", is_flag=True, help="Redact nothing: keep personal data and secrets.")
@click.option("--region", help="AWS region. [default: the environment's or profile's]")
@with_force
def command(source: str, out: Path, **options: Any) -> None:
    """Turn production traffic into rows for `eval` and `train`.

    The source is a file with spans (OTLP/JSON) or with a data set of AgentCore Evaluations, the folder of a gateway's --store,
    the ARN of a deployed agent, or a log group of CloudWatch. The first message of each session becomes a row. Emails, phone
    numbers, cards, IBANs, keys, tokens and IP addresses become placeholders. The same value gets the same placeholder.

    Read the rows before you use them. A reward needs more than a prompt: add the known answers, or use a judge.

    \b
    Example:
        agentcore-rl harvest traces.jsonl --out rows.jsonl --eval-out eval.jsonl
        agentcore-rl harvest ARN --since 30d --user-attribute user.id --out rows.jsonl --eval-out eval.jsonl
    """
    from ...traffic.redaction import Redaction
    from ...traffic.rows import harvest

    files = [path for path in (out, options["eval_out"], options["sft_out"]) if path is not None]
    given = [*files, Path(source)]
    if len({path.resolve() for path in given}) < len(given):
        raise ConfigError("--out, --eval-out, --sft-out and SOURCE need different paths")
    for path in files:
        new_file(path, force=options["force"])
    if options["no_redact"] and options["patterns"]:
        raise ConfigError("--redact and --no-redact contradict each other")
    redaction = None if options["no_redact"] else Redaction(options["patterns"])
    left_out: Counter[str] = Counter()
    begin_s = int(time.time()) - _seconds(options["since"])
    found = _read(source, options, begin_s, left_out)
    rows, held_out = harvest(
        found,
        left_out,
        prompt_field=options["prompt_field"],
        redaction=redaction,
        held_out_share=EVAL_SHARE if options["eval_out"] is not None else 0.0,
        begin_ns=0 if Path(source).exists() else begin_s * 10**9,
    )
    if not rows and not held_out:
        missing = "".join(f" {count} {reason}." for reason, count in left_out.items())
        raise ConfigError(
            f"there is no invocation of an agent in {source}.{missing} Traces in CloudWatch need Transaction Search, and an "
            "agent with AWS's OpenTelemetry distribution"
        )
    _write(out, [row for row, _ in rows], "rows")
    if options["eval_out"] is not None:
        _write(options["eval_out"], held_out, "rows, of other users")
        if not rows or not held_out:
            click.echo(
                f"warning: {nearby(options['eval_out'] if rows else out)} is empty. A hash of the user decides to which file "
                "the rows of a user belong, and there are too few users for both. Harvest more traffic, or leave out --eval-out",
                err=True,
            )
    if options["sft_out"] is not None:
        exact = [sequence for _, each in rows for sequence in each.sequences]
        dialogues = exact or [_dialogue(each, redaction) for _, each in rows if each.answer]
        what = "sequences of sampled tokens" if exact else "dialogues, without the tokens that were sampled"
        _write(options["sft_out"], dialogues, what)
    for reason, count in left_out.items():
        click.echo(f"{count} {reason}")
    counts = sorted(redaction.counts.items()) if redaction is not None else []
    kinds = ", ".join(f"{count} {kind.lower()}" for kind, count in counts) or "nothing"
    click.echo(f"redacted: {kinds}" if redaction is not None else "nothing was redacted (--no-redact)")


def _read(source: str, options: Mapping[str, Any], begin_s: int, left_out: Counter[str]) -> list[Invocation]:
    """Read the invocations of a source, in CloudWatch also those of sessions that began earlier. Raises: ConfigError."""
    from ...deploy.calls import Calls
    from ...traffic.rows import from_dataset, invocations
    from ...traffic.sources import read_cloudwatch, read_file
    from ...traffic.spans import read_spans

    user_key, path = options["user_attribute"], Path(source)
    if path.is_dir():
        exact = options["sft_out"] is not None and options["no_redact"]
        return _from_gateway(path, left_out, exact=exact)
    if path.is_file():
        records = read_file(path)
        if records and all("turns" in record for record in records):
            return from_dataset(records)
        return invocations(read_spans(records), left_out, user_key)
    if not (source.startswith("arn:") or "/" in source):
        raise ConfigError(
            f"there is no file {source}, and no folder; give one, the ARN of an agent, or a log group such as aws/spans"
        )
    region = options["region"] or (source.split(":")[3] if source.startswith("arn:") else None)
    calls = Calls(region=region, rehearse=False, say=click.echo)
    found = read_cloudwatch(partial(calls, "logs"), source, begin_s=begin_s - SESSION_S, end_s=int(time.time()))
    return invocations(read_spans(found), left_out, user_key, begin_s * 10**9)


def _from_gateway(folder: Path, left_out: Counter[str], *, exact: bool) -> list[Invocation]:
    """Read the sessions of a gateway's store, with the sampled tokens if ``exact``. Raises: ConfigError, GatewayError."""
    from ...gateway.capture.record import decode
    from ...gateway.capture.turns import expand
    from ...gateway.store.reader import Reader
    from ...gateway.store.schema import FILE, connect
    from ...traffic.rows import Invocation
    from ...traffic.spans import text_of
    from ...trajectory import build_trajectory

    path, found = folder / FILE, list[Invocation]()
    if not path.is_file():
        raise ConfigError(f"{folder} is no store of a gateway: it has no {FILE}")
    with contextlib.closing(Reader(connect(path, read_only=True), path)) as reader:
        for session in reader.sessions():
            name, whole = session.session_id, expand([*map(decode, reader.readable(reader.numbers(session.number)))])
            said = [(m.get("role"), text_of(m.get("content")).strip()) for m in whole.dialogue]
            prompts = [place for place, (role, text) in enumerate(said) if role == "user" and text]
            if not prompts:
                left_out["sessions were left out: they have no message of a user"] += 1
                continue
            begun = next((place for place, (role, _) in enumerate(said) if role == "assistant"), len(said))
            end = next((place for place in prompts if place > begun), len(said))  # a later message needs the history
            prompt, replies = said[prompts[0]][1], reversed(said[:end])
            answer = next((text for role, text in replies if role == "assistant" and text), "")
            sequences = build_trajectory(name, whole.turns, temperature=None).sequences if exact else ()
            rows = [
                {"input_ids": list(s.token_ids), "assistant_masks": list(s.loss_mask)}
                for s in sequences
                if any(s.loss_mask)
            ]
            found.append(Invocation(session=name, user=name, prompt=prompt, answer=answer, sequences=rows))
    return found


def _seconds(text: str) -> int:
    found = re.fullmatch(r"(\d+)([mhd])", text.strip())
    if found is None:
        raise ConfigError(f"--since {text} is not a time such as 90m, 12h or 7d")
    return int(found[1]) * _UNITS[found[2]]


def _dialogue(invocation: Invocation, redaction: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": invocation.prompt}, {"role": "assistant", "content": invocation.answer}]
    row = {"messages": messages, "retokenized": True}
    return row if redaction is None else dict(redaction.value(row))


def _write(path: Path, rows: Sequence[Mapping[str, Any]], what: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    click.echo(f"{nearby(path)}: {len(rows)} {what}")
