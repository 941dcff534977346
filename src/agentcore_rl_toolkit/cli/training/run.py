"""One training run on a stack: the loop of `examples/grpo_loop/train.py`, shown, stored, ended by what breaks."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib.util
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import click

from ...errors import AgentCoreRLError, ConfigError
from ..output import dialogue
from ..output.commands import nearby
from ..output.terminal import visible
from ..servers.vllm import MODEL_ID
from .stack import QUIET, Copy, Stack, explain, say_what_is_slow, start, start_copy

if TYPE_CHECKING:
    from rich.console import Console

    from ...backends.collection.collect import Recording
    from ...client import RolloutClient
    from ...gateway import GatewayClient
    from .display import Display
    from .report import Report
    from .services import Services
    from .trackers import Trackers

CLOSE_DEADLINE_S = 5.0
WHEN = ("before", "after")
TPS_LIMIT = 1000  # the runtime is on this machine
LOOP = "grpo_loop/train.py"
EVALUATION = "evaluation"  # folder of what evaluations beside the training keep


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """What is to be trained, on what. ``title`` names the agent in the picture and in what is printed."""

    title: str
    agent: Path
    model: Path | None
    run_dir: Path
    config: Any  # the loop's own
    rows: Sequence[Mapping[str, Any]]
    held_out: Sequence[Mapping[str, Any]]
    trackers: Sequence[str] = ()
    session_env: Sequence[str] = dataclasses.field(default=(), repr=False)
    runtime_options: Sequence[str] = ()
    engine: str = "policy"

    @property
    def total(self) -> int:
        """All that the run will start."""
        config = self.config
        evaluations = 2 + ((config.steps - 1) // config.eval_every if self.evaluates_beside else 0)
        return int(evaluations * len(self.held_out) + config.steps * config.groups * config.rollouts)

    @property
    def evaluates_beside(self) -> bool:
        return bool(self.config.eval_every and self.held_out)


def example(name: str) -> Path:
    """A file of the examples: beside the sources in a clone, inside the package when installed from a wheel."""
    package = Path(__file__).resolve().parents[2]
    for root in (package.parents[1] / "examples", package / "_examples"):
        if (root / name).exists():
            return root / name
    raise ConfigError(f"examples/{name} is not part of this installation; clone the repository and run it from there")


def load_loop() -> ModuleType:
    """The loop as a module."""
    path = example(LOOP)
    spec = importlib.util.spec_from_file_location(f"agentcore_rl_example_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    return module


def start_for(job: Job, services: Services, admin_key: str) -> Stack:
    """The stack that this job needs, on this machine. ``services`` end its processes."""
    return start(
        services,
        job.agent,
        folder=job.run_dir,
        model=job.model,
        admin_key=admin_key,
        report=say_what_is_slow,
        session_env=job.session_env,
        runtime_options=job.runtime_options,
        engine=job.engine,
    )


async def run(loop: ModuleType, job: Job, console: Console, *, stack: Stack | None = None) -> dict[str, Any]:
    """Train on this stack, else on one that is started for it and gone afterwards. Returns the summary."""
    import secrets

    from .services import Services

    admin_key = stack.gateway_admin_key if stack is not None else secrets.token_urlsafe(24)
    environment = {**QUIET, "AGENTCORE_RL_GATEWAY_ADMIN_KEY": admin_key}
    with Services(job.run_dir / "logs", env=environment) as services:
        evaluation: Copy | None = None
        if stack is None:
            stack = await asyncio.to_thread(start_for, job, services, admin_key)
        if job.evaluates_beside:
            evaluation = await asyncio.to_thread(
                start_copy,
                services,
                folder=job.run_dir / EVALUATION,
                model=job.model,
                engine=stack.engine,
            )
        return await _train(loop, job, console, stack, evaluation, asyncio.create_task(services.watch()))


async def _train(
    loop: ModuleType, job: Job, console: Console, stack: Stack, evaluation: Copy | None, watch: asyncio.Task[Any]
) -> dict[str, Any]:
    from ...gateway import GatewayClient

    started = time.monotonic()
    with (
        recorded(job, stack) as recording,
        observed(job, console, recording) as (report, observer),
        clients(job, stack) as (client, gateway),
        contextlib.ExitStack() as exits,
    ):
        parts = loop.Services(
            client=client,
            gateway=gateway,
            policy_url=stack.policy_url,
            engine=stack.engine,
            run_dir=job.run_dir,
            model_dir=job.model,
            recording=recording,
        )
        if evaluation is not None:
            beside = exits.enter_context(GatewayClient(evaluation.gateway_url, admin_key=stack.gateway_admin_key))
            second = {"gateway": beside, "policy_url": evaluation.policy_url, "run_dir": job.run_dir / EVALUATION}
            parts = dataclasses.replace(parts, evaluation=dataclasses.replace(parts, **second))
        training = asyncio.create_task(loop.train(parts, job.config, job.rows, job.held_out, observer))
        await _until_done_or_broken(training, watch)
    return finish(job, report, time.monotonic() - started)


@contextlib.contextmanager
def observed(job: Job, console: Console, recording: Recording) -> Iterator[tuple[Report, Observer]]:
    """What takes the events of a run: the display, the files of its folder, the trackers."""
    from .display import Display
    from .report import Report
    from .trackers import Trackers

    report = Report(job.run_dir)
    settings = dataclasses.asdict(job.config)
    with Trackers(job.trackers, job.run_dir, settings) as trackers, Display(console, job.total) as display:
        yield report, Observer(display, report, trackers, recording)


@contextlib.contextmanager
def recorded(job: Job, stack: Stack) -> Iterator[Recording]:
    """What writes the rollouts into the run's folder, all of them written afterwards."""
    from ...backends.collection.collect import open_recording
    from ...runtime.remote import RuntimeView

    view = RuntimeView(stack.runtime_url)
    with open_recording(
        job.run_dir,
        dataclasses.asdict(job.config),
        tokenizer=job.model or Path(__file__).resolve().parents[2] / "policy" / "weights",
        session_log=lambda session_id: "".join(view.log(session_id)),
    ) as recording:
        yield recording


@contextlib.contextmanager
def clients(job: Job, stack: Stack) -> Iterator[tuple[RolloutClient, GatewayClient]]:
    """The clients of a run on a stack, closed afterwards."""
    from ...client import Deadlines, RolloutClient
    from ...gateway import GatewayClient

    client = RolloutClient(
        stack.agent_arn,
        stack.store,
        job.run_dir.name,
        model_id=MODEL_ID,
        endpoint_url=stack.runtime_url,
        tps_limit=TPS_LIMIT,
        # Sessions on this machine stop in milliseconds or, with their runtime, have already ended.
        deadlines=Deadlines(stop_s=CLOSE_DEADLINE_S - 1),
    )
    gateway = GatewayClient(stack.gateway_url, admin_key=stack.gateway_admin_key)
    try:
        yield client, gateway
    finally:
        # A service that died may leave a call hanging; stopping the services ends it, so do not wait long here.
        _close_within(CLOSE_DEADLINE_S, client.close, gateway.close)


def finish(job: Job, report: Report, wall_s: float) -> dict[str, Any]:
    """Write the summary and the learning curve. Returns the summary."""
    summary = report.summarise(
        exp_id=job.run_dir.name,
        config=dataclasses.asdict(job.config),
        held_out=len(job.held_out),
        wall_s=wall_s,
    )
    report.plot(f"Reward of {job.title}")
    return summary


class Observer:
    """Sends the events of a training to the display, to the files and to the trackers."""

    def __init__(self, display: Display, report: Report, trackers: Trackers, recording: Recording) -> None:
        self._recording = recording
        self._display = display
        self._report = report
        self._trackers = trackers

    def __call__(self, event: str, facts: dict[str, Any]) -> None:
        match event:
            case "rollouts_started":
                self._display.rollouts_started(facts["phase"], facts["total"])
            case "rollout":
                rollout = facts["rollout"]
                tokens = rollout.trajectory.report.sampled_tokens if rollout.trajectory is not None else 0
                self._display.rollout(rollout.cause, rollout.score, tokens, beside=facts.get("beside", False))
            case "step":
                self._report.add(event, facts)
                self._trackers.event(event, facts)
                self._display.step(facts)
            case "evaluated":
                self._report.add(event, facts)
                self._trackers.event(event, facts)
                self._display.evaluated(facts)
            case "resumed":
                evaluations = facts.get("evaluations_from")
                self._recording.resumed(facts["steps_done"], evaluations)
                self._report.drop_steps_from(facts["steps_done"], evaluations)
                self._trackers.resumed(facts["steps_done"])
                self._display.resumed(facts["rollouts_done"])


async def _until_done_or_broken(training: asyncio.Task[None], watch: asyncio.Task[Any]) -> None:
    """Wait for the training; end it when a service dies, on Ctrl-C (cancellation) and on SIGTERM."""
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, training.cancel)
    try:
        await asyncio.wait({training, watch}, return_when=asyncio.FIRST_COMPLETED)
        if watch.done() and not training.done():
            training.cancel()
            await asyncio.wait({training}, timeout=10)
            watch.result()
        if training.done() and training.cancelled():
            raise KeyboardInterrupt
        try:
            training.result()
        except Exception:
            # A dead service usually shows first as a refused connection: say which one died, not only what it broke.
            await asyncio.wait({watch}, timeout=1.5)
            if watch.done():
                watch.result()
            raise
    finally:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)
        for task in (training, watch):
            task.cancel()
        await asyncio.wait({training, watch}, timeout=10)


def _close_within(deadline_s: float, *closers: Callable[[], None]) -> None:
    threads = [threading.Thread(target=close, daemon=True) for close in closers]
    for thread in threads:
        thread.start()
    give_up = time.monotonic() + deadline_s
    for thread in threads:
        thread.join(max(0.0, give_up - time.monotonic()))


def quiet_libraries() -> None:
    """Progress bars of libraries would break the live panel, and saving a policy of 2 MB needs none."""
    with contextlib.suppress(ModuleNotFoundError):
        from transformers.utils import logging

        logging.disable_progress_bar()


def print_end(console: Console, job: Job, report: Report, summary: dict[str, Any]) -> None:
    """One input before and after, the held-out rewards, and what became of all rollouts."""
    from rich.table import Table

    from .display import share, share_of

    problem = report.telling_problem()
    for when in WHEN:
        rollout = report.sample_dialogue(when, problem)
        if rollout is not None:
            console.print(f"\n[bold]One input, {when} training[/] (reward {rollout['reward']})")
            for line in dialogue.lines(rollout["dialogue"]):
                console.print(line, highlight=False, markup=False)
    if job.held_out:
        table = Table(title="\nHeld-out inputs", title_justify="left", title_style="bold")
        for name in ("", "before", "after"):
            table.add_column(name, justify="right" if name else "left")
        for name, reward, n in (("reward", "reward", "scored"), ("of those that ended ok", "reward_ok", "ok")):
            cells = [share_of(summary[f"held_out_{reward}_{w}"], summary[f"held_out_{n}_{w}"]) for w in WHEN]
            table.add_row(name, *cells)
        if summary["tool_use_before"] is not None:
            table.add_row("uses a tool", share(summary["tool_use_before"]), share(summary["tool_use_after"]))
        console.print(table)
    if summary["steps_that_taught"] < summary["steps"]:
        console.print(
            f"{summary['steps_that_taught']} of {summary['steps']} steps could teach anything: in the others the "
            "rewards were equal within every group",
            highlight=False,
            soft_wrap=True,
        )
    gap = summary["logprob_gap_max"]
    differ = "" if gap is None else f"; sampled and recomputed logprobs differ by at most {gap:.1e}"
    console.print(
        f"{summary['rollouts']} rollouts, {summary['lost_rollouts']} lost, {summary['causes'].get('agent', 0)} failed by the "
        f"agent, {summary['causes'].get('policy', 0)} by the policy; "
        f"{share(summary['trained_token_share'])} of the sampled tokens trained{differ}",
        highlight=False,
        soft_wrap=True,
    )


def print_stopped(console: Console, run_dir: Path, go_on: str) -> None:
    """After Ctrl-C: where everything is, and the command that goes on, in one piece each."""
    console.print("\n[yellow]Stopped.[/]", end=" ")
    left = f"Everything up to now is in {nearby(run_dir)}. Go on with:\n    {go_on}"
    console.print(left, highlight=False, markup=False, soft_wrap=True)


def print_broken(error: AgentCoreRLError, run_dir: Path, go_on: str) -> None:
    """Why a run ended, on stderr: the cause in the first line, then its details and the command that goes on."""
    click.echo(visible(f"error: {explain(error)}"), err=True)
    click.echo(f"Everything up to now is in {nearby(run_dir)}; go on with:\n    {go_on}", err=True)
