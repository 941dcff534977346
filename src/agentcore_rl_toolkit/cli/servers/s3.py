"""`agentcore-rl s3`: an S3 endpoint over a directory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import click

from ..options import allowed_hosts as _allowed_hosts
from ..output.screen import Command


@click.group()
def group() -> None:
    """Local S3 endpoint over a directory."""


@group.command(
    cls=Command,
    sections={
        "Objects": ("directory", "buckets", "auto_create", "fsync"),
        "This server": ("host", "port", "credential_file", "callers"),
    },
)
@click.option(
    "--dir", "directory", required=True, type=click.Path(file_okay=False, path_type=Path), help="Where objects live."
)
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", default=0, show_default=True, help="0 picks a free port.")
@click.option(
    "--credential-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Demand signed requests: a file of mode 0600 with KEY:SECRET. Or AGENTCORE_RL_CREDENTIALS in the environment.",
)
@click.option(
    "--callers",
    type=click.Choice(["user", "any"]),
    default="user",
    show_default=True,
    help="Who may use it where no credential is given: this machine's user, or whoever reaches the port.",
)
@click.option("--access-key", hidden=True)
@click.option("--secret-key", hidden=True)
@click.option("--bucket", "buckets", multiple=True, help="Create this bucket at start; may be given several times.")
@click.option("--auto-create/--no-auto-create", default=False, help="Create buckets on first write.")
@click.option("--fsync/--no-fsync", default=False, help="Make every write survive a power failure.")
@click.option("--region", default="us-east-1", show_default=True)
@click.option(
    "--ready-file", type=click.Path(dir_okay=False, path_type=Path), help="Write the URL here once listening."
)
@click.option("--parent-pid", type=int, help="Exit when this process is gone.")
@_allowed_hosts
def serve(
    directory: Path,
    host: str,
    port: int,
    credential_file: Path | None,
    callers: Literal["user", "any"],
    access_key: str | None,
    secret_key: str | None,
    buckets: tuple[str, ...],
    auto_create: bool,
    fsync: bool,
    region: str,
    ready_file: Path | None,
    parent_pid: int | None,
    allowed_hosts: tuple[str, ...],
) -> None:
    """Serve a directory to unmodified S3 clients.

    Point them at it with AWS_ENDPOINT_URL_S3. Without a credential this machine's user may use it, with any.
    """
    from ..._servers.private_files import ON_A_COMMAND_LINE, credentials_from
    from ...errors import ConfigError
    from ...s3 import S3Config
    from ...s3.server import serve as run

    if access_key is not None or secret_key is not None:
        raise ConfigError(f"--access-key and --secret-key are not taken: {ON_A_COMMAND_LINE}")
    credentials = credentials_from(os.environ, credential_file)
    config = S3Config(root=directory, credentials=credentials, auto_create=auto_create, fsync=fsync, region=region)
    run(
        config,
        host=host,
        port=port,
        buckets=buckets,
        ready_file=ready_file,
        parent_pid=parent_pid,
        announce=click.echo,
        allowed_hosts=allowed_hosts,
        callers=callers,
    )
