"""`agentcore-rl view`: runs in the browser."""

from __future__ import annotations

import asyncio
import json
import sys
import webbrowser
from pathlib import Path

import click

from ..errors import ConfigError
from .options import allowed_hosts as allowed_hosts_option


@click.command()
@click.argument("runs", nargs=-1)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=0, type=click.IntRange(0, 65535), help="Port [default: a free one].")
@allowed_hosts_option
@click.option("--open/--no-open", "opened", default=None, help="Open the browser [default: where there is a terminal].")
@click.option(
    "--export", type=click.Path(dir_okay=False, path_type=Path), help="Write one RUN as a file that opens from disk."
)
@click.option(
    "--limit", default=500, show_default=True, type=click.IntRange(min=1), help="--export: rollouts in the file."
)
@click.option("--step", type=int, help="--export: rollouts of this step only.")
@click.option("--ready-file", type=click.Path(dir_okay=False, path_type=Path), hidden=True)
@click.option("--parent-pid", type=int, hidden=True)
def command(
    runs: tuple[str, ...],
    host: str,
    port: int,
    allowed_hosts: tuple[str, ...],
    opened: bool | None,
    export: Path | None,
    limit: int,
    step: int | None,
    ready_file: Path | None,
    parent_pid: int | None,
) -> None:
    """Look at RUNS, folders or names under runs/, in the browser [default: all runs of this folder, also ones to come].

    A run that goes on is shown as it grows. What models wrote is shown as text and never obeyed. Whoever can reach the
    address can read the runs: it is this machine only unless --host says otherwise.

    \b
    Example:
        agentcore-rl view
        agentcore-rl view runs/quickstart-20260101-120000 --export run.html
    """
    from ..runs import Query, RunReader, find_run
    from ..view.data import Runs

    given = [find_run(name) for name in runs]
    if export is not None:
        from ..view.export import export as write

        if len(given) > 1:
            raise ConfigError("--export writes one run: name one")
        with RunReader(given[0] if given else find_run(None)) as run:
            query = Query(step=step) if step is not None else Query(sort="id", descending=True)
            held, total = write(run, export, query, limit=limit)
        left = f"; {total - held} are left out (--limit, --step)" if held < total else ""
        click.echo(f"{export}: {held} of {total} rollouts{left}")
        return
    from ..view.server import serve

    def ready(url: str) -> None:
        click.echo(f"{url}\nCtrl-C stops.")
        if ready_file is not None:
            partial = ready_file.with_name(ready_file.name + ".new")
            partial.write_text(json.dumps({"url": url}))
            partial.replace(ready_file)
        if opened if opened is not None else sys.stdout.isatty():
            webbrowser.open(url)

    shown = Runs(given, Path.cwd())
    try:
        asyncio.run(serve(shown, host=host, port=port, allowed_hosts=allowed_hosts, ready=ready, parent_pid=parent_pid))
    except KeyboardInterrupt:
        sys.exit(130)
