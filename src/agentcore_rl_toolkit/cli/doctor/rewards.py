"""`agentcore-rl eval --check`: does the reward distinguish a policy that does nothing from a policy that knows the answer?

A scripted model stands in for the policy. It replies with an empty text, and in a second pass with the known answer of the row.
A row that the empty text solves rewards doing nothing. A row that its own answer does not solve cannot be learned, unless the
agent needs tool calls to succeed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from ..._portal import Portal
from ...client.evaluation import EvalRow
from ..output.terminal import visible

NOTHING, ANSWER = "nothing", "answer"  # parts of the scripted models' names: nothing-0, answer-0, nothing-1, ...
LISTED = 5


def check_rewards(
    agent: Path,
    rows: Sequence[EvalRow],
    *,
    field: str,
    folder: Path,
    concurrency: int,
    timeout_s: float,
    score: str | None = None,
    **services: Any,
) -> bool:
    """Run both passes and print what they found. Returns True if no row rewards an empty text.

    ``field`` of a row is its known answer. ``score`` names a scorer, which replaces the agent's rewards.
    ``services`` are arguments of `training.stack.start`. Raises: ConfigError.
    """
    from ...backends.collection.groups import Group, GroupRequest
    from ...client import RolloutClient
    from ...gateway import GatewayClient
    from ..training.evaluation import collect, evaluation_config
    from ..training.stack import Upstream, own

    known = [row for row in rows if row.payload.get(field) is not None]
    texts = {f"{ANSWER}-{i}": str(row.payload[field]) for i, row in enumerate(known)}
    asked: set[str] = set()
    config = evaluation_config(max_concurrent=concurrency, rollout_timeout_s=timeout_s, score=score)
    with (
        _scripted(texts, asked) as url,
        own(agent, folder=folder, upstream=Upstream(url=url, engine="openai", relayed=True), **services) as stack,
        RolloutClient(stack.agent_arn, stack.store, "check", endpoint_url=stack.runtime_url, tps_limit=500.0) as client,
        GatewayClient(stack.gateway_url, admin_key=stack.gateway_admin_key) as gateway,
    ):

        def scores(policy: str, rows: Sequence[EvalRow]) -> list[tuple[str, float | None]]:
            models = [{"model_id": f"{policy}-{i}"} for i in range(len(rows))]
            found: dict[int, Group] = {}
            requests = (
                GroupRequest(input_id=row.input_id, payload=row.payload, overrides=model)
                for row, model in zip(rows, models, strict=True)
            )
            collect(requests, found.__setitem__, config=config, client=client, gateway=gateway)
            return [(row.input_id, found[place].rollouts[0].score) for place, row in enumerate(rows)]

        idle = scores(NOTHING, rows)
        answered = scores(ANSWER, known) if known else []
    given_away = [name for name, score in idle if score is not None and score >= 1]
    _print("an empty reply", idle, given_away, "These rows give the full reward for an empty reply")
    if not known:
        click.echo(
            f"the known answer: the rows do not have the field {field!r}; give another field with --answer FIELD"
        )
    elif not asked & texts.keys():
        click.echo(
            "the known answer: not checked, because the agent asks for a fixed model id, and the check selects replies by this id"
        )
    else:
        failed = [name for name, score in answered if score is not None and score < 1]
        why = "Not solved, because the answer is wrong or the agent needs tool calls"
        _print(f"the known answer ({field})", answered, failed, why)
    return not given_away


def _print(policy: str, scored: Sequence[tuple[str, float | None]], wrong: Sequence[str], why: str) -> None:
    """Print how many rows a policy solves, and the first of those that are wrong."""
    rows = [score for _, score in scored if score is not None]
    lost = f", and {len(scored) - len(rows)} have no score" if len(rows) < len(scored) else ""
    names = ", ".join(wrong[:LISTED]) + (", ..." if len(wrong) > LISTED else "")
    solved = sum(score >= 1 for score in rows)
    click.echo(visible(f"{policy} solves {solved} of {len(rows)} rows{lost}" + (f". {why}: {names}" if wrong else "")))


@contextlib.contextmanager
def _scripted(texts: Mapping[str, str], asked: set[str]) -> Iterator[str]:
    """Serve a model whose reply depends on its name. Yield its URL. Other names get an empty reply. Add names to ``asked``."""
    from ...gateway.testing import ScriptedEngine, Seen

    def decide(seen: Seen) -> dict[str, Any]:
        name = str(seen.body.get("model"))
        asked.add(name)
        return {"content": texts.get(name, "")}

    portal, engine = Portal("scripted-model"), ScriptedEngine(gives_tokens=False, decide=decide)
    portal.call(engine.start())
    try:
        yield engine.url
    finally:
        portal.call(engine.stop())
        portal.close()
