"""`agentcore-rl sft`: train on the tokens that good rollouts of earlier runs sampled, or on demonstrations."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import click
from pydantic import Field

from ...backends.settings import Count, Settings, SettingsGroup
from ...backends.training.settings import LearnerSettings, OptimizerSettings, TorchSettings
from ...client.data import read_rows
from ...errors import ConfigError
from ...runs import demonstrations, find_run, locked, read_config, write_config
from ...runs.folder import SUMMARY
from ..models import model_option
from ..options import from_words, settings_option
from ..output.commands import nearby, program
from ..output.terminal import visible
from .run import quiet_libraries
from .settings import LocalRun, fitted, new_folder


class ImitationSettings(SettingsGroup):
    """The rollouts to imitate. ``min_reward`` is needed for runs; ``batch_tokens`` of an optimizer step.

    ``sources`` are runs, or files as `runs export` writes them, which are taken whole.
    """

    sources: tuple[str, ...]
    min_reward: float | None = None
    best_of_group: bool = False
    epochs: Count = 2
    batch_tokens: Count = 8192
    seed: int = 0


class Imitation(Settings):
    """The settings of `agentcore-rl sft`. Raises: ConfigError."""

    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        name: LocalRun.DEFAULTS[name] for name in ("schedule", "warmup_steps", "beta2", "max_grad_norm")
    }

    imitation: ImitationSettings
    learner: LearnerSettings = Field(default_factory=LearnerSettings)
    optimizer: OptimizerSettings = Field(default_factory=OptimizerSettings)

    @classmethod
    def complete(cls, given: dict[str, Any]) -> dict[str, Any]:
        sources = given.get("sources")
        if not sources:
            raise ConfigError("--from RUN is missing: give the run whose rollouts are imitated")
        runs = [name for name in sources if not Path(name).is_file()]
        if not runs and given.get("model") is None:
            raise ConfigError("--model is missing: a file does not contain the model of its token ids")
        if not runs and (given.get("min_reward") is not None or given.get("best_of_group")):
            raise ConfigError(
                "all rows of a file are imitated: give min_reward and best_of_group to `runs export`, which writes the file"
            )
        # The ids are those of the first run's tokenizer.
        model = given.get("model") or read_config(find_run(runs[0])).get("model")
        return fitted({**given, "model": model})

    def rows(self, source: str) -> Sequence[Mapping[str, Any]]:
        """Return the sequences of one source. Print how those of a run were selected. Raises: ConfigError without any."""
        if Path(source).is_file():
            rows = read_rows(source)
            if not all({"input_ids", "assistant_masks"} <= row.keys() for row in rows):
                raise ConfigError(
                    f"{source} has rows without `input_ids` and `assistant_masks`, which `runs export` writes"
                )
            return rows
        how = self.imitation
        chosen: Any = {"min_reward": how.min_reward, "best_of_group": how.best_of_group}
        return list(demonstrations(find_run(source), **chosen, report=lambda text: click.echo(visible(text))))


@click.command()
@click.option(
    "--from", "sources", multiple=True, metavar="RUN", help="A run, or a file of `runs export`. Required; repeatable."
)
@model_option()
@settings_option
@click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), help="Folder of the run. [default: runs/sft-...]"
)
def command(sources: tuple[str, ...], model: Path | None, words: tuple[str, ...], out: Path | None) -> None:
    """Imitate good rollouts of earlier runs, or demonstrations.

    A run gives its training rollouts that ended ok with a reward of at least min_reward. A file gives all its rows. Settings of
    --set: min_reward (required for runs), best_of_group, epochs, batch_tokens, learning_rate, lora_rank, seed and more.

    \b
    Example:
        agentcore-rl sft --from runs/shop-20260101-120000 --set min_reward=1
    """
    imitate(sources, model, words, out)


def imitate(sources: tuple[str, ...], model: Path | None, words: tuple[str, ...], out: Path | None) -> None:
    """Train, and write a run's folder, which other commands take as `--model`.

    Raises: ConfigError if a setting is wrong, or if a source has nothing to imitate.
    """
    values = {**from_words(words, Imitation), "sources": sources, **({"model": str(model)} if model else {})}
    settings = Imitation.from_values(values, where="options")
    quiet_libraries()
    rows = [row for source in settings.imitation.sources for row in settings.rows(source)]
    tokens = sum(sum(row["assistant_masks"][1:]) for row in rows)
    if not tokens:
        raise ConfigError("nothing to imitate: `assistant_masks` is 1 for no token")
    run_dir = new_folder(out, "sft")
    write_config(run_dir, {"kind": "sft", **settings.flat()})
    click.echo(f"imitating {len(rows)} sequences, {tokens} sampled tokens  run directory {nearby(run_dir)}")
    with locked(run_dir), (run_dir / "metrics.jsonl").open("a", buffering=1) as metrics:

        def observe(facts: dict[str, Any]) -> None:
            metrics.write(json.dumps({"event": "imitated", **facts}) + "\n")
            click.echo(
                f"step {facts['step'] + 1} of {facts['steps']}  loss {facts['loss']:.4f}  "
                f"{facts['computed_tokens_per_s']:.0f} tokens/s  {facts['peak_memory_gb']:.1f} GB"
            )

        asyncio.run(_imitate(settings, rows, run_dir, observe))
    click.echo(f"use it: {program()} eval --model {nearby(run_dir)}, {program()} train --model {nearby(run_dir)}")


async def _imitate(
    settings: Imitation, rows: Sequence[Mapping[str, Any]], run_dir: Path, observe: Callable[[dict[str, Any]], None]
) -> None:
    from ...backends.training.imitation import imitate
    from ...backends.training.torch_client import TorchClient

    how = settings.imitation
    training = TorchClient.open(TorchSettings(**dict(settings.learner), seed=how.seed), None, run_dir=run_dir)
    try:
        await imitate(
            training,
            rows,
            optimizer=settings.optimizer,
            epochs=how.epochs,
            batch_tokens=how.batch_tokens,
            seed=how.seed,
            observe=observe,
        )
        training.save_policy()
        (run_dir / SUMMARY).write_text(json.dumps({"kind": "sft"}) + "\n")
    finally:
        await training.close("success")
