"""The quickstart: start the three services, run `examples/grpo_loop/train.py` against them, show and store what happens."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
import json
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import click

from ...errors import AgentCoreRLError, ConfigError
from ..terminal import visible

if TYPE_CHECKING:
    from rich.console import Console

    from .display import Display
    from .report import Report

AGENT_NAME = "math"
CLOSE_DEADLINE_S = 5.0
SMOKE_STEPS, SMOKE_HELD_OUT = 8, 64  # a run of a few steps is a smoke test; most of its time would go into evaluation


@click.command()
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Run directory. [default: runs/<exp_id>]")
@click.option("--steps", type=click.IntRange(1), help="GRPO steps.")
@click.option("--groups", type=click.IntRange(1), help="Problems in each step.")
@click.option("--rollouts", type=click.IntRange(2), help="Rollouts of each problem; their rewards are compared.")
@click.option(
    "--held-out",
    type=click.IntRange(1),
    help="Problems never trained on, run before and after. [default: 200; 64 for runs of fewer than 8 steps]",
)
@click.option("--learning-rate", type=float, help="Peak learning rate.")
@click.option("--seed", type=int, help="Seed of problems and training.")
@click.option("--resume", is_flag=True, help="Go on with the newest unfinished run, or with the one in --out.")
@click.option(
    "--agent",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Agent file to train. [default: the math agent of the examples]",
)
def command(out: Path | None, resume: bool, agent: Path | None, **options: Any) -> None:
    """Train a small tool-using agent on this machine and watch its reward rise.

    Starts a local AgentCore Runtime, a model gateway and a small policy, runs the Strands math agent of the examples in
    hundreds of isolated sessions, and trains the policy with GRPO on exactly the tokens it sampled. No AWS account, no
    GPU, no downloads; about three minutes on two cores. Everything is stored under runs/<exp_id>/.
    """
    from rich.console import Console
    from rich.markup import escape

    console = Console()
    loop_file = example("grpo_loop/train.py")
    agent_file = (agent or example("strands_math_agent/rl_app.py")).resolve()
    loop = load_module(loop_file)
    _no_progress_bars()
    run_dir, config = choose_run(loop, out, resume, {k: v for k, v in options.items() if v is not None})
    try:
        summary = asyncio.run(_run(loop, run_dir, config, agent_file, console))
    except KeyboardInterrupt:
        console.print(
            f"\n[yellow]Stopped.[/] Everything up to now is in {escape(str(run_dir))}. Go on with:\n"
            f"    agentcore-rl quickstart --resume --out {escape(str(run_dir))}"
        )
        sys.exit(130)
    except AgentCoreRLError as e:
        console.print(f"\n[red]The run ended:[/] {escape(visible(e))}", highlight=False)
        console.print(
            f"Everything up to now is in {run_dir}; --resume --out {run_dir} goes on from the last step.", markup=False
        )
        sys.exit(1)
    console.print(f"Finished in {summary['wall_s']:.0f} s. Curve, metrics and trajectories: {run_dir}", markup=False)


def example(name: str) -> Path:
    """A file of the examples: beside the sources in a clone, inside the package when installed from a wheel."""
    package = Path(__file__).resolve().parents[2]
    for root in (package.parents[1] / "examples", package / "_examples"):
        if (root / name).exists():
            return root / name
    raise ConfigError(f"examples/{name} is not part of this installation; clone the repository and run it from there")


def load_module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"agentcore_rl_example_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    return module


def choose_run(loop: ModuleType, out: Path | None, resume: bool, options: Mapping[str, Any]) -> tuple[Path, Any]:
    """The run directory and configuration: new ones, or those of the run to go on with.

    Raises: ConfigError when there is nothing to resume, a run would be overwritten, or options contradict the stored ones.
    """
    if not resume:
        run_dir = (out or Path("runs") / time.strftime("quickstart-%Y%m%d-%H%M%S")).resolve()
        if (run_dir / "config.json").exists():
            raise ConfigError(f"{run_dir} already holds a run; go on with --resume, or choose another --out")
        run_dir.mkdir(parents=True, exist_ok=True)
        short = options.get("steps", SMOKE_STEPS) < SMOKE_STEPS
        config = loop.Config(**({"held_out": SMOKE_HELD_OUT} if short else {}) | dict(options))
        (run_dir / "config.json").write_text(json.dumps(dataclasses.asdict(config), indent=2) + "\n")
        return run_dir, config
    if out is None:
        unfinished = [p.parent for p in Path("runs").glob("*/config.json") if not (p.parent / "summary.json").exists()]
        if not unfinished:
            raise ConfigError(
                "there is no unfinished run under runs/; start one without --resume, or name it with --out"
            )
        out = max(unfinished, key=lambda p: p.stat().st_mtime)
    run_dir = out.resolve()
    if not (run_dir / "config.json").exists():
        raise ConfigError(f"{run_dir} holds no run to go on with (no config.json)")
    stored = json.loads((run_dir / "config.json").read_text())
    changed = {k: v for k, v in options.items() if stored.get(k) != v}
    if changed:
        raise ConfigError(
            f"a resumed run keeps its configuration; drop {', '.join('--' + k.replace('_', '-') for k in changed)}"
        )
    return run_dir, loop.Config(**stored)


async def _run(loop: ModuleType, run_dir: Path, config: Any, agent_file: Path, console: Console) -> dict[str, Any]:
    from rich.markup import escape

    from ...client import Deadlines, RolloutClient
    from ...gateway import GatewayClient
    from .display import Display
    from .report import Report
    from .services import Services

    exp_id = run_dir.name
    store = f"file://{run_dir / 'store'}"
    (run_dir / "store").mkdir(exist_ok=True)
    report = Report(run_dir)
    console.print(f"[bold]AgentCore RL quickstart[/]  run directory {escape(str(run_dir))}", highlight=False)
    threads = str(max(1, (os.cpu_count() or 2) // 2))
    admin_key = secrets.token_urlsafe(24)
    environment = {**_quiet_environment(), "AGENTCORE_RL_GATEWAY_ADMIN_KEY": admin_key}
    with Services(run_dir / "logs", env=environment) as services:
        policy = services.launch("policy server", ["policy", "serve", "--threads", threads])
        runtime = services.launch(
            "runtime",
            [
                "runtime",
                "serve",
                "--agent",
                f"{AGENT_NAME}={agent_file}",
                "--state-dir",
                str(run_dir / "sessions"),
            ],
        )
        policy, runtime = await asyncio.gather(
            asyncio.to_thread(services.wait_ready, policy), asyncio.to_thread(services.wait_ready, runtime)
        )
        gateway = services.launch(
            "gateway",
            ["gateway", "serve", "--upstream", policy.url, "--engine", "policy", "--store", str(run_dir / "turns")],
        )
        gateway = await asyncio.to_thread(services.wait_ready, gateway)
        started = time.monotonic()
        total = 2 * config.held_out + config.steps * config.groups * config.rollouts
        for name, value in _LOCAL_CREDENTIALS.items():
            os.environ.setdefault(name, value)
        client = RolloutClient(
            runtime.ready["agents"][AGENT_NAME],
            store,
            exp_id,
            model_id="policy",
            endpoint_url=runtime.url,
            tps_limit=1000,
            # Sessions on this machine stop in milliseconds or, with their runtime, have already ended.
            deadlines=Deadlines(stop_s=CLOSE_DEADLINE_S - 1),
        )
        gateway_client = GatewayClient(gateway.url, admin_key=admin_key)
        try:
            with Display(console, total) as display:
                parts = loop.Services(client=client, gateway=gateway_client, policy_url=policy.url, run_dir=run_dir)
                training = asyncio.create_task(loop.train(parts, config, _Observer(display, report)))
                await _until_done_or_broken(training, asyncio.create_task(services.watch()))
        finally:
            # A service that died may leave a call hanging; stopping the services ends it, so do not wait long here.
            _close_within(CLOSE_DEADLINE_S, client.close, gateway_client.close)
        summary = report.summarise(exp_id=exp_id, config=dataclasses.asdict(config), wall_s=time.monotonic() - started)
        report.plot()
    _print_end(console, report, summary)
    return summary


def _close_within(deadline_s: float, *closers: Callable[[], None]) -> None:
    threads = [threading.Thread(target=close, daemon=True) for close in closers]
    for thread in threads:
        thread.start()
    give_up = time.monotonic() + deadline_s
    for thread in threads:
        thread.join(max(0.0, give_up - time.monotonic()))


def _no_progress_bars() -> None:
    # Saving a policy of 2 MB needs none, and they would break the live panel.
    from transformers.utils import logging

    logging.disable_progress_bar()


# The local runtime accepts any signature; boto3 only insists that there is one to make.
_LOCAL_CREDENTIALS = {"AWS_ACCESS_KEY_ID": "local", "AWS_SECRET_ACCESS_KEY": "local", "AWS_REGION": "us-west-2"}


def _quiet_environment() -> dict[str, str]:
    # Busy-waiting OpenMP threads cost two to three times the CPU on a machine whose cores are shared by all parts.
    return {"OMP_WAIT_POLICY": "passive", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}


async def _until_done_or_broken(training: asyncio.Task[None], watch: asyncio.Task[None]) -> None:
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


class _Observer:
    """Sends the loop's events to the display and to the files."""

    def __init__(self, display: Display, report: Report) -> None:
        self._display = display
        self._report = report

    def __call__(self, event: str, facts: dict[str, Any]) -> None:
        match event:
            case "rollouts_started":
                self._display.rollouts_started(facts["phase"], facts["total"])
            case "rollout":
                rollout = facts["rollout"]
                tokens = rollout.trajectory.report.sampled_tokens if rollout.trajectory is not None else 0
                self._display.rollout(str(rollout.outcome), rollout.reward, tokens)
            case "rollouts_finished":
                self._report.add_rollouts(facts["phase"], [r for g in facts["groups"] for r in g.rollouts])
            case "step":
                self._report.add(event, facts)
                self._display.step(facts)
            case "evaluated":
                self._report.add(event, facts)
                self._display.evaluated(facts)
            case "resumed":
                self._report.drop_steps_from(facts["steps_done"])
                self._display.resumed(facts["rollouts_done"])


def _print_end(console: Console, report: Report, summary: dict[str, Any]) -> None:
    from rich.table import Table

    from .display import share

    problem = report.telling_problem()
    for when in ("before", "after"):
        rollout = report.sample_dialogue(when, problem)
        if rollout is not None:
            console.print(f"\n[bold]One problem, {when} training[/] (reward {rollout['reward']})")
            for message in rollout["dialogue"]:
                _print_message(console, message)
    table = Table(title="\nHeld-out problems", title_justify="left", title_style="bold")
    for name in ("", "before", "after"):
        table.add_column(name, justify="right" if name else "left")
    table.add_row("reward", share(summary["held_out_reward_before"]), share(summary["held_out_reward_after"]))
    table.add_row("uses the calculator", share(summary["tool_use_before"]), share(summary["tool_use_after"]))
    console.print(table)
    gap = summary["logprob_gap_max"]
    console.print(
        f"{summary['rollouts']} rollouts, {summary['lost_rollouts']} lost; "
        f"{share(summary['trained_token_share'])} of the sampled tokens trained; sampled and recomputed logprobs differ by at "
        f"most {'-' if gap is None else f'{gap:.1e}'}",
        highlight=False,
    )


def _print_message(console: Console, message: dict[str, Any]) -> None:
    role = str(message.get("role"))
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    calls = message.get("tool_calls") or []
    shown = " ".join([str(content).strip(), *(f"{c['function']['name']}({c['function']['arguments']})" for c in calls)])
    console.print(visible(f"  {role:>9}  {shown.strip()}"), highlight=False, markup=False)
