"""`agentcore-rl quickstart`: `agentcore-rl train` with the math agent of the examples and the built-in problems."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from ...errors import ConfigError
from ..models import model_option
from ..options import as_json, engine_option, from_words, settings_option
from ..train import train_here
from .settings import LocalRun, new_folder

# Many problems per step and few rollouts of each: the reward rises most steadily if the policy soon solves most problems.
SHAPE = {"steps": 10, "groups": 16, "rollouts": 4, "learning_rate": 6e-4}
HELD_OUT = 96  # a standard error of 2 points at 95 %
SMOKE_STEPS, SMOKE_HELD_OUT = 8, 64  # evaluation must not take most of the time of a run of a few steps


@click.command()
@click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), help="Folder of the run. [default: runs/<exp_id>]"
)
@click.option("--steps", type=click.IntRange(1), help="Training steps. [default: 10]")
@click.option("--resume", is_flag=True, help="Continue the newest unfinished run, or the run in --out.")
@click.option(
    "--agent",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Agent file to train. [default: the math agent of the examples]",
)
@model_option()
@settings_option
@engine_option
@as_json
def command(out: Path | None, resume: bool, words: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Train a small tool-using agent on this machine and watch its reward rise.

    The command starts a local AgentCore Runtime, a model gateway, and a small model. It runs the Strands math agent of the
    examples in about 800 isolated sessions, and trains the model with GRPO on exactly the tokens that it sampled.

    It needs no AWS account, no GPU, and no download, and takes one to two minutes on two idle cores. The folder
    runs/<exp_id>/ contains everything.
    """
    given = from_words(words, LocalRun) | {name: value for name, value in options.items() if value is not None}
    if not resume:
        out = new_folder(out, "quickstart")
        given = _preset(out, given)
    train_here(given, None, (), out=out, resume=resume, as_json=as_json, title="AgentCore RL quickstart", alone=True)


def _preset(run_dir: Path, given: dict[str, Any]) -> dict[str, Any]:
    """Write the problems of a new run into its folder, and return its settings."""
    from ...policy import problems

    values = {"agent": example("strands_math_agent/arithmetic_app.py"), **SHAPE, **given}
    if "model" in given and "learning_rate" not in given:
        del values["learning_rate"]  # it suits the built-in policy only
    held_out = int(values.pop("held_out", SMOKE_HELD_OUT if values["steps"] < SMOKE_STEPS else HELD_OUT))
    seed = values.get("seed", 0)
    parts: Any = (("data", "train", values["steps"] * values["groups"]), ("eval_data", "held_out", held_out))
    for name, split, n in parts:
        values[name] = run_dir / f"{split}.jsonl"
        rows = (json.dumps({"prompt": p.prompt, "answer": p.answer}) for p in problems(split, n, seed=seed))
        values[name].write_text("".join(f"{row}\n" for row in rows))
    return values


def example(name: str) -> Path:
    """Return a file of the examples, which are next to the sources in a clone and inside the package in a wheel."""
    package = Path(__file__).resolve().parents[2]
    for root in (package.parents[1] / "examples", package / "_examples"):
        if (root / name).exists():
            return root / name
    raise ConfigError(f"examples/{name} is not part of this installation; run it from a clone of the repository")
