"""`agentcore-rl eval`: run an agent over a data set and print its mean reward."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import random
import re
import secrets
import shlex
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..backends.scorer import scorer_files
from ..contract import REFERENCE_FIELD, Cause, Outcome, advise_on_calls
from ..errors import ConfigError, LocalRuntimeError
from ..runs.folder import ROLLOUTS, read_object
from ..store import parse_url
from .agents.agentcore_project import deployed_arn
from .models import WORDS, Model, model_option
from .options import (
    AGENT,
    DEPLOYED_HELP,
    UP_AGENT,
    SectionedCommand,
    adding,
    as_json,
    from_environment,
    json_object,
    session_arguments,
    with_agent_as_is,
    with_judge,
    with_sessions,
)
from .output.commands import nearby, program
from .output.failures import Failure, explain
from .output.terminal import stdout_for_json, visible

if TYPE_CHECKING:
    from ..backends.llm_judge import JudgeSettings
    from ..client import BatchItem
    from ..client.evaluation import EvalRow
    from .training.evaluation import Opened
    from .training.stack import Stack

STORE_WITHIN_S = 15.0
NO_MODEL = "none"
MODEL = ("base_url", "model_id", "api_key")
SECTIONS = {
    "Agent and model": "agent model base_url model_id sampling_params model_hosts policy_models",
    "Data": "data limit shuffle repeat for_training checks answer",
    "Limits": "concurrency timeout",
    "Rewards": "score judge judge_url judge_model judge_weight",
    "Sessions": "session_env env_file readable writable",
    "The run": "out resume bucket as_json",
}
# Options that a resumed run keeps.
SAME = ("agent", "model", "model_id", "sampling_params", "score", "for_training", "repeat", "shuffle")
OF_SESSIONS = ("session_env", "readable", "writable", "model_hosts", "policy_models")
POSITIVE = click.FloatRange(min=0, min_open=True)


_FILE, _FOLDER = click.Path(path_type=Path, exists=True, dir_okay=False), click.Path(path_type=Path, file_okay=False)
_OUT = "Folder of the run. The keys of its records begin with its name. [default: runs/COMMAND-DATA, then COMMAND-DATA-2, ...]"
_MODEL = (
    f"The model of an agent on this machine: {WORDS}; none: the agent calls its own model. [default: that of `up`, otherwise the "
    "built-in policy]"
)
_COUNT = click.IntRange(min=1)
_PLACES = (
    click.option("--resume", is_flag=True, help="Continue the last run of this data, or the run in --out."),
    click.option("--out", type=_FOLDER, help=_OUT),
    click.option(
        "--bucket", help="Bucket or store URL for records. [default for an agent on this machine: a folder in --out]"
    ),
    click.option("--agent", metavar=f"ARN|{AGENT}", help=f"{DEPLOYED_HELP}.{UP_AGENT}"),
)
# Options of rollouts of an agent over a data set.
with_agent = adding(
    (
        *_PLACES,
        model_option(type=Model(besides=NO_MODEL), metavar="MODEL|none", help=_MODEL),
        click.option("--data", required=True, type=_FILE, help="JSONL or Parquet; each row is a payload."),
    )
)
_MEASUREMENT = (
    with_sessions,
    with_agent_as_is,
    with_judge,
    click.option("--timeout", default=900.0, show_default=True, type=POSITIVE, help="Seconds per rollout."),
    click.option(
        "--sampling-params",
        metavar="JSON",
        callback=lambda _, option, text: None if text is None else json_object(text, "--sampling-params"),
        help="Sampling parameters for the agent, e.g. '{\"temperature\": 0}'.",
    ),
    from_environment("--api-key", "AGENTCORE_RL_MODEL_API_KEY"),
    click.option("--limit", type=_COUNT, help="Use only this number of rows. [default: all]"),
    click.option("--repeat", default=1, show_default=True, type=_COUNT, help="Rollouts per row, for pass@k."),
    click.option("--concurrency", default=16, show_default=True, type=_COUNT, help="Rollouts at the same time."),
)
with_measurement = adding(_MEASUREMENT)
# Options of a command that calls `command` for its models.
with_evaluation = adding(
    (*_MEASUREMENT, *_PLACES, click.option("--data", type=_FILE, help="JSONL or Parquet; each row is a payload."))
)


@click.command(cls=SectionedCommand, sections=SECTIONS)
@with_agent
@with_measurement
@click.option("--shuffle", is_flag=True, help="Use the rows in a random order, which is the same each time.")
@click.option("--base-url", help="Address of a model, whose key is AGENTCORE_RL_MODEL_API_KEY.")
@click.option("--model-id", help="Name of the model, for the agent.")
@click.option(
    "--for-training", is_flag=True, help="Mark the rollouts as training data, so that `sft` may imitate them later."
)
@click.option(
    "--check",
    "checks",
    is_flag=True,
    help="Check the rewards instead. An empty reply should not solve a row, and the known answer should.",
)
@click.option(
    "--answer",
    metavar="FIELD",
    help="With --check: the field of the row that contains the known answer. [default: answer, with --score _reference]",
)
@as_json
def command(**options: Any) -> None:
    """Run an agent over a data set, and print the mean reward with its confidence interval.

    If `agentcore-rl up` runs in this folder, eval uses its agent and model. For another file, eval starts a runtime. It also
    starts a model, unless --base-url contains the address of one.

    Failures of the agent and of the policy count as 0. Failures of the infrastructure do not count. A second mean is over the
    rollouts that ended ok. OUT contains results.jsonl, results.csv, and summary.json, and `agentcore-rl view OUT` shows every
    rollout.

    Exit code: 0; 1 if rollouts failed (failures of the policy are results); 2 for a wrong option; 130 after Ctrl-C. Ctrl-C keeps
    finished rollouts, and prints the command that continues the run.

    \b
    Example:
        agentcore-rl eval --agent shop/agent.py --data shop/eval.jsonl
        agentcore-rl eval --agent ARN --bucket NAME --data rows.jsonl --base-url URL --model-id NAME
    """
    from ..client.evaluation import read_rows
    from ..runs import locked, read_config, write_config

    check_options(options)
    rows = read_rows(options["data"])
    if options["shuffle"]:
        random.Random("eval").shuffle(rows)
    rows = rows[: options["limit"]]
    if options["checks"] or options["answer"]:
        _check_rewards(rows, options)
        return
    exp_id, out = experiment(options)
    out.mkdir(parents=True, exist_ok=True)
    shown = """agent data model repeat limit shuffle model_id base_url sampling_params timeout score judge judge_url
        judge_model judge_weight for_training"""
    kept = {name: options[name] for name in shown.split() if options[name] is not None}
    with locked(out):
        begun = (out / ROLLOUTS).exists()  # an evaluation that could not start leaves only its configuration
        before = (begun and read_config(out)) or kept
        changed = [f"--{name.replace('_', '-')}" for name in SAME if str(before.get(name)) != str(kept.get(name))]
        if changed:
            others = ", ".join(changed)
            raise ConfigError(
                f"the run in {nearby(out)} began with another {others}: repeat its options, or choose another --out"
            )
        write_config(out, {"kind": "eval", "exp_id": exp_id, **kept}, replace=not begun)
        failures = _evaluate(rows, exp_id, out, options)
    if failures:
        sys.exit(1)


def _check_rewards(rows: list[EvalRow], options: dict[str, Any]) -> None:
    """Run `eval --check`. Exit with 1 if a row rewards an empty reply."""
    from .doctor.rewards import check_rewards
    from .training.stack import agent_file, scratch_folder

    apart = "model base_url model_id sampling_params for_training judge out resume bucket as_json"
    given = [name for name in apart.split() if options[name]] + (["repeat"] if options["repeat"] > 1 else [])
    if not options["checks"]:
        raise ConfigError("--answer FIELD needs --check")
    if given or options["agent"] is None or _deployed(options["agent"]):
        others = "".join(f", and does not go with --{name.removeprefix('as_').replace('_', '-')}" for name in given[:1])
        raise ConfigError(f"--check needs --agent FILE{others}")
    agent = agent_file(options["agent"])
    hidden = [options["data"], *scorer_files(options["score"])]
    with scratch_folder("check") as folder:
        passed = check_rewards(
            agent,
            rows,
            field=options["answer"] or ("answer" if options["score"] is None else REFERENCE_FIELD),
            score=options["score"],
            folder=folder,
            concurrency=options["concurrency"],
            timeout_s=options["timeout"],
            **session_arguments(options, hidden),
        )
    if not passed:
        sys.exit(1)


def experiment(options: dict[str, Any], kind: str = "eval", begun: str = ROLLOUTS) -> tuple[str, Path]:
    """Return the name and folder of --out, or of a new folder, or with --resume of the last run that has the file ``begun``.

    Raises: ConfigError.
    """
    from ..runs import read_config
    from ..runs.folder import make_folder

    first = f"{kind}-{options['data'].stem}"
    if options["out"]:
        out: Path = options["out"].resolve()
        config = read_config(out)
        if config and config.get("kind") != kind:
            raise ConfigError(f"{nearby(out)} holds a run of another command; choose another --out")
        if (out / begun).exists() and not options["resume"]:
            raise ConfigError(f"{nearby(out)} holds a run; continue it with --resume, or choose another --out")
        return re.sub(r"[^A-Za-z0-9_-]", "-", out.name)[:99] or first, out
    runs = Path("runs").resolve()
    if not options["resume"]:
        out = make_folder(runs, first)
        return out.name, out
    names = (first if number == 1 else f"{first}-{number}" for number in itertools.count(1))
    exp_id = first
    for name in itertools.takewhile(lambda name: (runs / name).exists(), names):
        exp_id = name if (runs / name / begun).exists() else exp_id
    return exp_id, runs / exp_id


def check_options(options: dict[str, Any]) -> None:
    """Check the options before anything starts, and find a deployed agent by its name. Raises: ConfigError."""
    if options["bucket"]:
        parse_url(options["bucket"])
        arn = deployed_arn(options["agent"] or "", Path.cwd())
        if arn is not None:
            click.echo(
                f"{options['agent']} is the deployed agent {arn}; without --bucket, this command serves it on this machine",
                err=True,
            )
            options["agent"] = arn
    if _judge(options) is not None and options["resume"]:
        raise ConfigError(
            "--resume does not work with --judge, which needs the dialogues of all rollouts. Start again with another --out"
        )
    from .training.stack import check_agent

    own_sessions = any(options.get(name) for name in OF_SESSIONS)
    check_agent(options["agent"], own_sessions=own_sessions)
    if options["model"] and (_deployed(options["agent"]) or options["base_url"]):
        raise ConfigError(
            "--model serves a model on this machine, for an agent on this machine. For a deployed agent, give the address "
            "of a model as --base-url URL"
        )
    if _deployed(options["agent"]) and own_sessions:
        raise ConfigError(
            "--session-env, --readable and --writable are for an agent on this machine; a deployed agent has its own settings"
        )


def _judge(options: dict[str, Any]) -> JudgeSettings | None:
    """Return the settings of the judge, if the options have one. Raises: ConfigError."""
    from ..backends.llm_judge import JudgeSettings

    given = {name: options[name] for name in JudgeSettings.model_fields if options.get(name) is not None}
    if given.keys() == {"judge_weight"}:
        raise ConfigError("--judge-weight needs --judge FILE")
    settings = JudgeSettings(**given)
    return settings if settings.judge else None


def _check_store(bucket: str, exp_id: str, region: str) -> None:
    """Check that results can be read from the bucket. Raises: ConfigError.

    A user who may read but not list passes: records are then read one by one.
    """
    if bucket.startswith("file://"):
        return
    from ..errors import StoreError, StorePermissionError
    from ..store import open_store

    try:
        open_store(bucket, default_region=region).list(f"{exp_id}/{secrets.token_hex(8)}", timeout_s=STORE_WITHIN_S)
    except StorePermissionError:
        pass
    except StoreError as e:
        raise ConfigError(f"--bucket {bucket}: {e}") from e


def _check_credentials() -> None:
    """Check that there are credentials: without them, every rollout would fail with the same cause. Raises: ConfigError."""
    import botocore.session

    from ..client.transport import HOW_TO_HAVE_THEM

    if botocore.session.get_session().get_credentials() is None:
        raise ConfigError(f"no credentials: {HOW_TO_HAVE_THEM}")


def _deployed(agent: str | None) -> bool:
    return agent is not None and agent.startswith("arn:")


def _goes_on(exp_id: str, *, out_given: bool) -> str:
    """Return the command line that continues this run: its arguments (only names of variables), its folder, --resume."""
    words = []
    for before, word in itertools.pairwise(sys.argv):
        hidden = 1 if before == "--session-env" else 2 if word.startswith("--session-env=") else None
        words.append(word if hidden is None else "=".join(word.split("=")[:hidden]))
    words += [] if out_given else ["--out", str(Path("runs") / exp_id)]
    return f"{program()} {shlex.join([*(word for word in words if word != '--resume'), '--resume'])}"


def _evaluate(rows: list[EvalRow], exp_id: str, out: Path, options: dict[str, Any]) -> int:
    from ..backends.collection.groups import CollectedRollout, Group, GroupRequest
    from ..client import BatchProgress
    from ..client.batch import WRONG_BUCKET, WRONG_SETTINGS
    from ..client.evaluation import score_of, summarize, write_results
    from ..runs import read_config, write_config
    from .training.evaluation import collect, evaluation_config, item_of, items_before

    repeat, places = options["repeat"], {row.input_id: place for place, row in enumerate(rows)}
    total, phase = len(rows) * repeat, "train" if options["for_training"] else "eval"
    items: list[BatchItem] = []
    judged: Counter[str] = Counter()
    began_s = time.monotonic()
    if options["resume"]:  # the summary has the time of all parts of the run
        began_s -= read_object(out / "summary.json").get("elapsed_s", 0.0)
    with (
        stdout_for_json(options["as_json"]),
        open_rollouts(options, exp_id, out, total, retries=1) as opened,
    ):
        config = evaluation_config(
            max_concurrent=options["concurrency"],
            rollout_timeout_s=options["timeout"],
            sampling_params=options["sampling_params"],
            **dict(_judge(options) or ()),
            score=options["score"] or opened.score,
        )
        payloads = {row.input_id: row.payload for row in rows}
        before = items_before(out, config, payloads) if options["resume"] else {}
        has_scored = any(item.success for each in before.values() for item in each)
        for file in filter(Path.is_file, scorer_files(config.score)[:1]):  # a module may be in an archive
            digest, kept = hashlib.sha256(file.read_bytes()).hexdigest(), read_config(out)
            if has_scored and kept.get("score_digest", digest) != digest:
                raise ConfigError(
                    f"{nearby(file)} has changed since the run in {nearby(out)} began, and one result cannot have rewards of two "
                    "scorers. Choose another --out"
                )
            write_config(out, {**kept, "score_digest": digest}, replace=True)
        opened.recording.run.forget(causes=(Cause.SCORER,))
        for name, place in places.items():
            before[name] = before.get(name, [])[:repeat]
            items += [dataclasses.replace(item, index=place * repeat + (item.index or 0)) for item in before[name]]
        outcomes, causes = (Counter(filter(None, map(attrgetter(name), items))) for name in ("outcome", "cause"))
        scores = [score for item in items if (score := score_of(item)) is not None]
        silent: list[str] = []  # sessions that ended ok without a model call

        def requests() -> Iterator[GroupRequest]:
            for row in rows:
                taken = {item.index for item in before[row.input_id]}
                if left := [k for k in range(repeat) if k not in taken][: repeat - len(before[row.input_id])]:
                    yield GroupRequest(input_id=row.input_id, payload=row.payload, n=len(left), places=left)

        def show(rollout: CollectedRollout) -> None:
            item = item_of(rollout, places[rollout.input_id] * repeat + rollout.index, config)
            items.append(item)
            outcomes[rollout.outcome] += 1
            if rollout.outcome is Outcome.OK and rollout.capture is not None and not rollout.capture.turns:
                silent.append(rollout.session_id)
            if rollout.cause is not None:
                causes[rollout.cause] += 1
            if (score := score_of(item)) is not None:
                scores.append(score)
            live, last = sys.stderr.isatty(), len(items) == total
            if live or len(items) % max(1, total // 20) == 0 or last:
                progress = BatchProgress(
                    total=total,
                    done=len(items),
                    ok=outcomes[Outcome.OK],
                    running=min(options["concurrency"], total - len(items)),
                    elapsed_s=time.monotonic() - began_s,
                    outcomes=outcomes,
                    causes=causes,
                )
                mean = f", mean reward {sum(scores) / len(scores):.4f}" if scores else ""
                click.echo(f"{progress}{mean}", err=True, nl=not live or last)
                if live and not last:
                    click.echo("\r\x1b[K", err=True, nl=False)
            error = rollout.error
            codes = {getattr(e, "code", None) for e in (error, error and error.__cause__)}
            if codes & (WRONG_BUCKET | WRONG_SETTINGS) and not last and not any(item.result for item in items):
                text = "the evaluation ends, because every rollout would fail like its first one"
                raise ConfigError(f"{text}: {rollout.reason}")

        def add(_: int, group: Group) -> None:
            judged.update(group.judge_usage)

        try:
            shared: dict[str, Any] = {"client": opened.client, "gateway": opened.gateway, "on_rollout": show}
            collect(requests(), add, config=config, recording=opened.recording.at(phase), **shared)
        finally:  # also after Ctrl-C: finished rollouts are kept, and --resume runs the rest
            summary = summarize(items, time.monotonic() - began_s, judged)
            if items:  # a refused --resume has none, and keeps the results of the run
                write_results(out, items, summary)
                opened.recording.run.event("evaluated", dataclasses.asdict(summary))
    advice = advise_on_calls(item.result for item in items)
    if advice:
        click.echo(visible(f"error: {advice}"), err=True)
    elif summary.failures:
        click.echo(visible(f"error: {most_frequent(items)}"), err=True)
    if silent and not advice:
        click.echo(
            f"warning: {len(silent)} of {total} rollouts made no model call that arrived at the gateway, and their rewards "
            "count. Check that the agent can reach `_rollout.base_url`, or use --model none for an agent that has its own model",
            err=True,
        )
    click.echo(json.dumps(dataclasses.asdict(summary), indent=2) if options["as_json"] else visible(summary))
    # Errors come first: the policy's failures are results.
    for item in sorted((i for i in items if not i.success or i.cause), key=lambda i: i.cause == Cause.POLICY)[:5]:
        click.echo(visible(f"  failed: {item.input_id} ({item.outcome}): {(item.error or '')[:200]}"), err=True)
    click.echo(f"results: {nearby(out)}", err=True)
    return summary.failures or len(advice)


@contextlib.contextmanager
def open_rollouts(
    options: dict[str, Any], exp_id: str, out: Path, rollouts: int, *, retries: int = 0
) -> Iterator[Opened]:
    """Check what the rollouts need, and open it. Raises: ConfigError.

    ``retries`` follow failures of the infrastructure, for agents without a gateway.
    Exit with a message when the services fail. Ctrl-C exits with the command that continues.
    """
    from ..backends.collection.recording import open_recording
    from ..client import RolloutClient
    from ..deploy.quotas import before_a_run
    from ..gateway import GatewayClient
    from .servers.vllm import MODEL_ID
    from .training.evaluation import Opened
    from .training.services import ServiceError
    from .training.stack import explain

    try:
        with _stack(options, out) as stack, contextlib.ExitStack() as exits:
            arn, bucket, url = options["agent"], options["bucket"], None
            if stack is not None:
                arn, bucket, url = stack.agent_arn, bucket or stack.store, stack.runtime_url
            else:
                _check_credentials()
            _check_store(bucket, exp_id, (arn.split(":") + [""] * 4)[3])
            if stack is None:
                found = before_a_run(arn, rollouts=rollouts)
                if found is not None:
                    click.echo(found, err=True)
            gateway = None
            given: dict[str, Any] = {name: options[name] for name in MODEL if options[name]} | {"retries": retries}
            if stack is not None and not _other_model(options):
                client = GatewayClient(stack.gateway_url, admin_key=stack.gateway_admin_key)
                gateway, given = exits.enter_context(client), {"model_id": MODEL_ID}
            tokenizer = None if gateway is None or stack is None else stack.tokenizer
            recording = exits.enter_context(open_recording(out, {}, tokenizer=tokenizer))
            tps = 25.0 if stack is None else 500.0
            agents = exits.enter_context(RolloutClient(arn, bucket, exp_id, tps_limit=tps, endpoint_url=url, **given))
            score = None if stack is None else stack.score
            yield Opened(client=agents, gateway=gateway, recording=recording, score=score)
    except KeyboardInterrupt:
        go_on = _goes_on(exp_id, out_given=options["out"] is not None)
        click.echo(f"\nstopped; finished rollouts are in {nearby(out)}. To continue:\n    {go_on}", err=True)
        sys.exit(130)
    except (LocalRuntimeError, ServiceError) as e:
        click.echo(visible(f"error: {explain(e)}"), err=True)
        sys.exit(1)


def _other_model(options: Mapping[str, Any]) -> bool:
    """Return True if the agent's model is at an address, or is its own."""
    return bool(options["base_url"]) or options["model"] == NO_MODEL


@contextlib.contextmanager
def _stack(options: dict[str, Any], out: Path) -> Iterator[Stack | None]:
    """Yield the stack that serves the agent's file, None for a deployed agent."""
    from .._servers.keys import credential_of_runtime
    from ..client.client import ENDPOINT_ENV
    from ..runtime.remote import RuntimeView
    from .training.stack import Stack, agent_file, running_or_own, use_local_credentials

    hidden = [out, *(options.get(name) for name in ("data", "eval_data", "judge")), *scorer_files(options.get("score"))]
    agent, model, bucket = options["agent"], options["model"], options["bucket"]
    running = Stack.running()
    if running is not None and agent == running.agent_arn:
        agent = None
    if _deployed(agent):
        if not bucket:
            raise ConfigError("--bucket is missing: give the bucket in which the deployed agent stores its results")
        endpoint = next((os.environ[name] for name in ENDPOINT_ENV if os.environ.get(name)), "")
        if credential_of_runtime(endpoint) is not None:  # a runtime of this machine
            RuntimeView(endpoint).hide(hidden)
        yield None
        return
    file = None if agent is None else agent_file(agent)
    use_local_credentials()
    wanted: dict[str, Any] = {"store": bucket if bucket and bucket.startswith("file://") else None}
    wanted |= {"without_model": True} if _other_model(options) else {"model": model} if model else {}
    sessions = {name: options.get(name, ()) for name in OF_SESSIONS}
    with running_or_own(file, folder=out, sessions=sessions, hidden=hidden, **wanted) as stack:
        yield stack


def most_frequent(items: Sequence[BatchItem]) -> str:
    """Describe the most frequent failure."""
    from ..client.evaluation import reward_of

    none = "the agent returned no reward"
    failed = [item for item in items if reward_of(item) is None and item.cause != Cause.POLICY]
    return explain([Failure.of(i.outcome, i.error or none, i.traceback) for i in failed], len(items))
