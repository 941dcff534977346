"""A training run: starts the services, trains, shows and stores the progress, and stops at the first fault."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...backends.scorer import scorer_files
from ...errors import AgentCoreRLError
from ..output.commands import nearby, program
from ..output.terminal import dialogue_lines, stdout_for_json, visible
from ..servers.vllm import MODEL_ID
from .stack import explain, running_or_own

if TYPE_CHECKING:
    from rich.console import Console

    from ...backends.training.settings import Observer, Services
    from ...weights import EngineAddress
    from .report import Report
    from .settings import LocalRun

WHEN = ("before", "after")
STOP_S = 4.0


def carry_out(
    settings: LocalRun, run_dir: Path, console: Console, *, go_on: str, as_json: bool = False, alone: bool = False
) -> None:
    """Train to the end and print the result. ``go_on`` is the command that resumes the run. ``alone``: as `train`.

    Exit codes: 0, 1 when the run ended early, 130 after Ctrl-C.
    """
    from .report import Report

    quiet_libraries()
    try:
        with stdout_for_json(as_json):
            summary = train(settings, run_dir, console, alone=alone)
    except KeyboardInterrupt:
        console.print("\n[yellow]Stopped.[/]", end=" ")
        left = f"Everything up to now is in {nearby(run_dir)}. Continue with:\n    {go_on}"
        console.print(left, highlight=False, markup=False, soft_wrap=True)
        sys.exit(130)
    except Exception as e:
        if isinstance(e, AgentCoreRLError):
            click.echo(visible(f"error: {explain(e)}"), err=True)
        else:
            traceback.print_exc()
        click.echo(f"Everything up to now is in {nearby(run_dir)}. Continue with:\n    {go_on}", err=True)
        sys.exit(1)
    print_end(console, Report(run_dir), summary)
    if as_json:
        click.echo((run_dir / "summary.json").read_text(), nl=False)


def train(settings: LocalRun, run_dir: Path, console: Console, *, alone: bool = False) -> dict[str, Any]:
    """Train on the stack of `agentcore-rl up`, or on a new stack that ends afterwards. Returns the summary.

    ``alone``: always on a new stack.

    Call it on the main thread. Raises: AgentCoreRLError; KeyboardInterrupt on Ctrl-C.
    """
    from ...backends.collection.recording import open_recording
    from ...backends.training.settings import Services
    from ...client import Deadlines, RolloutClient
    from ...gateway import GatewayClient
    from ...runs import locked
    from ...runtime.remote import RuntimeView
    from ...weights import EngineAddress

    rows, held_out = settings.rows()
    with contextlib.ExitStack() as exits:
        exits.enter_context(locked(run_dir))
        runner = exits.enter_context(asyncio.Runner())  # closed last: a thread of it may wait for a service
        inputs = settings.inputs
        hidden = [inputs.data_path, inputs.eval_data_path, settings.judging.judge, run_dir]
        hidden += scorer_files(settings.scoring.score)
        stack = exits.enter_context(
            running_or_own(
                inputs.agent,
                folder=run_dir,
                sessions=dict(settings.sessions),
                hidden=hidden,
                alone=alone,
                model=settings.learner.model,
                engine=settings.engine,
                dtype=settings.learner.dtype,
                forced_tools=settings.forced_tools,
                history=settings.history,
            )
        )
        if stack.pid != os.getpid():
            console.print(
                f"on the services of `agentcore-rl up` ({stack.runtime_url})", highlight=False, soft_wrap=True
            )
        exits.enter_context(stack.trained())
        started = time.monotonic()
        view = RuntimeView(stack.runtime_url)
        recording = exits.enter_context(
            open_recording(
                run_dir,
                settings.kept(),
                tokenizer=stack.tokenizer,
                session_log=lambda session_id: "".join(view.log(session_id)),
            )
        )
        report, observer = exits.enter_context(observed(settings, run_dir, console, held_out=len(held_out)))
        client = exits.enter_context(
            RolloutClient(
                stack.agent_arn,
                stack.store,
                run_dir.name,
                model_id=MODEL_ID,
                endpoint_url=stack.runtime_url,
                tps_limit=settings.limits.tps_limit,
                max_pool_connections=settings.limits.max_pool_connections,
                # Sessions on this machine stop in milliseconds or, with their runtime, have already ended.
                deadlines=Deadlines(stop_s=STOP_S),
            )
        )
        gateway = exits.enter_context(GatewayClient(stack.gateway_url, admin_key=stack.gateway_admin_key))
        services = Services(client=client, gateway=gateway, run_dir=run_dir, recording=recording)
        kind: Any = stack.engine
        engine = EngineAddress(url=stack.policy_url, engine=kind, model=MODEL_ID)
        runner.run(_train(settings, services, engine, observer, rows, held_out))
    return report.summarize(
        exp_id=run_dir.name,
        config=settings.kept(),
        held_out=len(held_out),
        wall_s=time.monotonic() - started,
    )


@contextlib.contextmanager
def observed(
    settings: LocalRun, run_dir: Path, console: Console, *, held_out: int
) -> Iterator[tuple[Report, Observer]]:
    """Yield a receiver of a run's events, for the display, the files of its folder, and the trackers."""
    from .display import Display, rollouts_of
    from .report import Report
    from .trackers import tracked

    report = Report(run_dir)

    def observe(event: str, facts: dict[str, Any]) -> None:
        if event in ("step", "evaluated"):
            report.add(event, facts)
            track(event, facts)
        display.observe(event, facts)

    with (
        tracked(settings.tracker, run_dir, settings.kept()) as track,
        Display(console, rollouts_of(settings.step, held_out), report.findings) as display,
    ):
        yield report, observe


async def _train(
    settings: LocalRun,
    services: Services,
    engine: EngineAddress,
    observe: Observer,
    rows: Sequence[Mapping[str, Any]],
    held_out: Sequence[Mapping[str, Any]],
) -> None:
    """Open the model, train it, and save it."""
    from ...backends.collection.groups import trained_temperature
    from ...backends.collection.teacher import teacher_at
    from ...backends.training.loop import train
    from ...backends.training.settings import State, TorchSettings
    from ...backends.training.torch_client import TorchClient
    from ...policy import WEIGHTS_DIR

    learner, teacher_url = settings.learner, settings.signals.teacher_url
    if teacher_url is not None:
        await asyncio.to_thread(teacher_at(teacher_url).check, learner.model or WEIGHTS_DIR)
    cores, dtype = os.cpu_count() or 2, await asyncio.to_thread(engine.connect().dtype) or learner.dtype
    if engine.engine == "policy" and dtype != learner.dtype:
        click.echo(f"note: training computes in {dtype}, as the engine of `agentcore-rl up` does", err=True)
    how = {
        "seed": settings.step.seed,
        "temperature": trained_temperature(settings.selection.sampling_params),
        "dtype": dtype,
        # With staleness, rollouts run meanwhile.
        "threads": cores if settings.step.max_staleness == 0 else max(1, cores // 2),
    }
    model = TorchSettings(**{**dict(learner), **how})
    resumed = State.read(services.run_dir)
    state = resumed.state if resumed else None
    training = await asyncio.to_thread(TorchClient.open, model, state, run_dir=services.run_dir, engine=engine)
    ended = "errored"
    try:
        await train(services, training, settings, rows, held_out, observe, resumed=resumed)
        await asyncio.to_thread(training.save_policy)
        ended = "success"
    finally:
        await training.close(ended)


def quiet_libraries() -> None:
    """Turn off progress bars of libraries, which would break the live panel."""
    with contextlib.suppress(ModuleNotFoundError):
        from transformers.utils import logging

        logging.disable_progress_bar()


def print_end(console: Console, report: Report, summary: dict[str, Any]) -> None:
    """Print one input before and after, the held-out rewards with a verdict, and the outcomes of all rollouts."""
    from rich.markup import escape
    from rich.table import Table

    from .display import failures, share, share_of, token_counts

    for when, rollout in report.example(summary["config"]["seed"]):
        console.print(f"\n[bold]A random input whose reward changed, {when} training[/] (reward {rollout['score']:g})")
        for line in dialogue_lines(rollout["dialogue"] or []):
            console.print(line, highlight=False, markup=False)
    if summary["held_out_problems"]:
        table = Table(title="\nHeld-out inputs", title_justify="left", title_style="bold")
        for name in ("", "before", "after"):
            table.add_column(name, justify="right" if name else "left")
        for name, reward, n in (("reward", "reward", "scored"), ("reward of ok rollouts only", "reward_ok", "ok")):
            cells = [share_of(summary[f"held_out_{reward}_{w}"], summary[f"held_out_{n}_{w}"]) for w in WHEN]
            table.add_row(name, *cells)
        bounds = [summary[f"held_out_interval_{w}"] or (None, None) for w in WHEN]
        table.add_row("95 % interval of reward", *(f"{share(low)} to {share(high)}" for low, high in bounds))
        if summary["tool_use_before"] is not None:
            table.add_row("uses a tool", share(summary["tool_use_before"]), share(summary["tool_use_after"]))
        metrics = [summary[f"held_out_metrics_{w}"] or {} for w in WHEN]
        for name in sorted(set().union(*metrics)):
            table.add_row(f"{escape(name)}, mean", *("-" if name not in m else f"{m[name]:.4g}" for m in metrics))
        console.print(table)
        console.print(f"Verdict: {summary['held_out_change']['text']}\n", highlight=False, markup=False, soft_wrap=True)
    gap = summary["logprob_gap_max"]
    differ = "" if gap is None else f"; sampled and recomputed logprobs differ by at most {gap:.1e}"
    lines = [
        f"{summary['rollouts']} rollouts, failed: {failures(summary['causes']) or 'none'}; {token_counts(summary)}{differ}",
        f"Finished in {summary['wall_s']:.0f} s. See it: {program()} view {nearby(report.run_dir)}",
    ]
    if summary["steps_that_taught"] < summary["steps"]:
        taught = f"{summary['steps_that_taught']} of {summary['steps']} steps could teach something"
        lines.insert(0, f"{taught}: in the others, all usable rollouts of each group had the same reward")
    if (summary.get("held_out_change") or {}).get("verdict") != "learned":
        lines[:0] = [f"! {visible(finding.text)}\n  {finding.advice}" for finding in report.findings()]
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
