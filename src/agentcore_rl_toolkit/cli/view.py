"""`agentcore-rl view`: runs in the browser."""

from __future__ import annotations

import asyncio
import os
import sys
import webbrowser
from pathlib import Path
from typing import Any

import click

from .._servers.process import write_ready
from ..errors import ConfigError
from .options import new_file, with_force, with_server


@click.command()
@click.argument("runs", nargs=-1)
@with_server
@click.option("--no-open", is_flag=True, help="Do not open the browser.")
@click.option("--export", type=click.Path(dir_okay=False, path_type=Path), help="Write one run into this HTML file.")
@with_force
def command(
    runs: tuple[str, ...], no_open: bool, export: Path | None, force: bool, ready_file: Path | None, **server: Any
) -> None:
    """Show RUNS in the browser. RUNS are folders, or names under runs/ [default: all runs of this folder, also later ones].

    The pages are updated while a run continues. They show the texts of models as plain text, never as HTML. The printed address
    contains a key. Give the address only to people who may read the runs.

    \b
    Example:
        agentcore-rl view
        agentcore-rl view runs/quickstart-20260101-120000 --export run.html
    """
    from ..runs import RunReader, find_run
    from ..view.data import Runs

    given = [find_run(name) for name in runs]
    if export is not None:
        from ..view.export import export as write

        if len(given) > 1:
            raise ConfigError("--export writes one run: give its folder or name")
        with RunReader(given[0] if given else find_run(None)) as run:
            click.echo(f"{export}: {write(run, new_file(export, force=force))}")
        return
    from ..view.server import serve

    def ready(url: str) -> None:
        click.echo(f"{url}\nCtrl-C stops.")
        if ready_file is not None:
            write_ready(ready_file, {"url": url, "pid": os.getpid()})
        if not no_open and sys.stdout.isatty():
            webbrowser.open(url)

    asyncio.run(serve(Runs(given, None if runs else Path.cwd()), ready=ready, **server))
