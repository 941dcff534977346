"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

allowed_hosts = click.option(
    "--allowed-host",
    "allowed_hosts",
    multiple=True,
    metavar="NAME",
    envvar="AGENTCORE_RL_ALLOWED_HOSTS",
    help="Another name of this server, of a load balancer or a service; * for any part of it. Repeatable "
    "[env: AGENTCORE_RL_ALLOWED_HOSTS, separated by blanks].",
)

as_json = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")


def engine_options(command: Any) -> Any:
    """What serves the model, and the Python of its environment."""
    python = click.option(
        "--engine-python",
        type=click.Path(path_type=Path),
        metavar="PYTHON",
        help="With --engine vllm: Python of vLLM's environment. [default: .venvs/vllm, or AGENTCORE_RL_ENGINE_PYTHON]",
    )
    engine = click.option(
        "--engine", type=click.Choice(["policy", "vllm"]), help="What serves the model. [default: policy]"
    )
    return engine(python(command))
