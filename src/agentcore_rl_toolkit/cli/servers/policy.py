"""`agentcore-rl policy`: run the built-in policy, or vLLM in its place."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from ..models import model_option
from ..options import with_server
from .vllm import command as vllm_command


@click.group(name="policy")
def group() -> None:
    """Run the built-in policy: a small language model that runs and trains on a CPU."""


@group.command(short_help="Serve the policy: token ids in, token ids and logprobs out.")
@model_option()
@with_server
@click.option("--threads", default=1, show_default=True, type=click.IntRange(1), help="Threads of one computation.")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16"]),
    help="Type of the model's numbers. [default: bfloat16 on a GPU, float32 on a CPU]",
)
@click.option("--seed", type=int, hidden=True)  # used if a request has no seed
def serve(model: Path | None, dtype: str | None, **settings: Any) -> None:
    """Serve the policy: token ids in, token ids and logprobs out, weights in. Stop it with Ctrl-C or SIGTERM.

    It is the engine of a gateway (`agentcore-rl gateway serve --engine policy --upstream URL`) and takes no chat messages. For a
    chat endpoint, use `agentcore-rl serve`.

    New weights need an admin key: AGENTCORE_RL_POLICY_ADMIN_KEY, or a new key whose file the command prints.
    """
    # Waiting threads of OpenMP spin by default, and so take the cores of other processes.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from ...policy.server.process import serve as serve_tokens

    serve_tokens(model, **settings, dtype=dtype, admin_key=os.environ.get("AGENTCORE_RL_POLICY_ADMIN_KEY") or None)


group.add_command(vllm_command)
