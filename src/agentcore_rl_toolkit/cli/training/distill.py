"""`agentcore-rl distill`: train an agent's policy towards a teacher's logprobs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ..options import SectionedCommand
from ..train import SECTIONS, train_here, with_training


@click.command(cls=SectionedCommand, sections={"Teacher": "teacher_url", **SECTIONS})
@with_training
@click.option("--teacher-url", metavar="URL", help="Address of vLLM, or of `policy serve`, with the teacher's model.")
def command(
    config_path: Path | None, words: tuple[str, ...], as_json: bool, out: Path | None, resume: bool, **flags: Any
) -> None:
    """Train an agent towards the probabilities of a teacher, which is a better model.

    The policy (the model in training) samples the rollouts. The advantage of a token is the teacher's logprob minus the
    policy's. Rewards count only with --set reward_weight=X. The teacher must have the same vocabulary.

    \b
    Example:
        agentcore-rl distill --agent shop/agent.py --data shop/train.jsonl --teacher-url http://127.0.0.1:8000
    """
    train_here(flags, config_path, words, out=out, resume=resume, as_json=as_json, distilled=True)
