"""`agentcore-rl invoke`: run one rollout and print its outcome, reward and dialogue."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..backends.scorer import scorer_files
from ..contract import ANSWER_FIELD, REFERENCE_FIELD, Cause
from ..errors import AgentCoreRLError
from .models import WORDS, model_option
from .options import (
    AGENT,
    AGENT_HELP,
    UP_AGENT,
    as_json,
    json_object,
    with_agent_as_is,
    with_sessions,
)
from .output.terminal import dialogue_lines, plain_log, stdout_for_json, visible

if TYPE_CHECKING:
    from ..backends.collection.groups import CollectedRollout
    from .training.stack import Stack


@click.command()
@click.argument("payload", metavar="PAYLOAD")
@click.option("--agent", metavar=AGENT, help=f"{AGENT_HELP}.{UP_AGENT}")
@model_option(help=f"The model: {WORDS} [default: that of `agentcore-rl up`, otherwise the built-in policy].")
@with_agent_as_is
@with_sessions
@click.option("--timeout", default=120.0, show_default=True, help="Seconds for the rollout.")
@as_json
def command(
    payload: str,
    agent: str | None,
    model: Path | None,
    score: str | None,
    timeout: float,
    as_json: bool,
    **sessions: Any,
) -> None:
    """Run one rollout of PAYLOAD, a JSON object, and print its outcome.

    Prints outcome, reward, tokens and the dialogue as the agent saw it; after a failure also the traceback and the end of the
    session's log. Exit code: 0, 1 when it failed or has no reward, 2 on a wrong option.

    \b
    Example:
        agentcore-rl invoke --agent shop/agent.py '{"prompt": "The shop has 41 lamps and sells 5.", "answer": "36"}'
    """
    from .training.stack import agent_file, check_agent, running_or_own, scratch_folder

    value = json_object(payload, "the payload")
    if REFERENCE_FIELD in value:
        with contextlib.suppress(OSError):  # sessions see the arguments of all processes on Linux
            start, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])
            ctypes.memset(start, 0, end - start)
    check_agent(agent, own_sessions=any(sessions.values()))
    file = None if agent is None else agent_file(agent)
    wanted: dict[str, Any] = {"sessions": sessions, "hidden": scorer_files(score)} | ({"model": model} if model else {})
    with (
        stdout_for_json(as_json),
        scratch_folder("invoke") as scratch,
        running_or_own(file, folder=scratch, **wanted) as stack,
    ):
        rollout = asyncio.run(_roll(stack, value, timeout, score or stack.score))
        log = _log_of(stack, rollout.session_id) if not rollout.usable else ""
    scored = rollout.reward is not None or (ANSWER_FIELD in (rollout.record or {}) and rollout.error is None)
    failed = str(rollout.outcome) != "ok" or not scored
    if failed:
        of_the_policy = " (policy)" if rollout.cause == Cause.POLICY else ""  # which is no fault of the agent
        what = "" if rollout.cause == Cause.SCORER else f"{rollout.outcome}{of_the_policy}: "
        click.echo(visible(f"error: {what}{rollout.reason}"), err=True)
    if as_json:
        click.echo(json.dumps(_facts(rollout, log), indent=2))
    else:
        _print(rollout, log)
    if failed:
        sys.exit(1)


async def _roll(stack: Stack, payload: dict[str, Any], timeout_s: float, score: str | None) -> CollectedRollout:
    from ..backends.collection.collect import collect_async
    from ..backends.collection.groups import GroupRequest
    from ..backends.collection.settings import CollectConfig
    from ..client import RolloutClient
    from ..gateway import GatewayClient
    from .servers.vllm import MODEL_ID

    config = CollectConfig(rollout_timeout_s=timeout_s, evaluation=True, score=score)
    with (
        RolloutClient(
            stack.agent_arn, stack.store, "invoke", model_id=MODEL_ID, endpoint_url=stack.runtime_url, tps_limit=100
        ) as client,
        GatewayClient(stack.gateway_url, admin_key=stack.gateway_admin_key) as gateway,
    ):
        request = GroupRequest(input_id=secrets.token_hex(4), payload=payload)
        [group] = await collect_async([request], client=client, gateway=gateway, config=config)
    return group.rollouts[0]


def _log_of(stack: Stack, session_id: str) -> str:
    """Return the end of the session's output, or "" if the runtime keeps none."""
    from ..runtime.remote import RuntimeView

    try:
        return "".join(RuntimeView(stack.runtime_url).log(session_id))[-4000:]
    except AgentCoreRLError:
        return ""


def _facts(rollout: CollectedRollout, log: str) -> dict[str, Any]:
    report = rollout.trajectory.report if rollout.trajectory is not None else None
    return {
        "session_id": rollout.session_id,
        "outcome": str(rollout.outcome),
        "cause": rollout.cause,
        "failure": rollout.failure,
        "reward": rollout.reward,
        "error": rollout.reason,
        "traceback": rollout.traceback,
        "elapsed_s": rollout.elapsed_s,
        "record": rollout.record,
        "dialogue": rollout.capture.dialogue if rollout.capture is not None else [],
        "turns": len(rollout.capture.turns) if rollout.capture is not None else 0,
        "sampled_tokens": report.sampled_tokens if report is not None else 0,
        "log": log,
    }


def _print(rollout: CollectedRollout, log: str) -> None:
    facts = _facts(rollout, log)
    reward = "-" if facts["reward"] is None else f"{facts['reward']:g}"
    whose = f" ({facts['cause']})" if facts["cause"] else ""
    turns = f"{facts['turns']} turn{'' if facts['turns'] == 1 else 's'}"
    click.echo(f"outcome {facts['outcome']}{whose}   reward {reward}   {turns}, {facts['sampled_tokens']} tokens")
    for line in dialogue_lines(facts["dialogue"]):
        click.echo(line)
    if facts["traceback"]:
        click.echo(f"\n{visible(facts['traceback'].strip())}")
    if log.strip() and not facts["traceback"]:
        click.echo(f"\nthe session's log ends with:\n{visible(plain_log(log.strip()))}")
