"""`agentcore-rl view`: runs in the browser."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
import webbrowser
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import click

from .._servers.process import write_ready
from ..errors import ConfigError
from .options import allowed_hosts as allowed_hosts_option


@click.command()
@click.argument("runs", nargs=-1)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=0, type=click.IntRange(0, 65535), help="Port [default: a free one].")
@allowed_hosts_option
@click.option("--no-open", is_flag=True, help="Do not open the browser.")
@click.option(
    "--export", type=click.Path(dir_okay=False, path_type=Path), help="Write one RUN as a file that opens from disk."
)
@click.option(
    "--tokenizer",
    type=click.Path(path_type=Path, exists=True),
    metavar="DIR",
    help="Folder with tokenizer.json, for the texts of a gateway's tokens.",
)
@click.option("--ready-file", type=click.Path(dir_okay=False, path_type=Path), hidden=True)
@click.option("--parent-pid", type=int, hidden=True)
def command(
    runs: tuple[str, ...],
    host: str,
    port: int,
    allowed_hosts: tuple[str, ...],
    no_open: bool,
    export: Path | None,
    tokenizer: Path | None,
    ready_file: Path | None,
    parent_pid: int | None,
) -> None:
    """Show RUNS, folders or names under runs/, in the browser [default: all runs of this folder, also later ones].

    An address (http://...) is a running gateway: its sessions are shown as they grow. The gateway of `agentcore-rl up` in this
    folder is shown too. The key is AGENTCORE_RL_GATEWAY_ADMIN_KEY, else that in the key file of a gateway on this machine.

    An unfinished run is shown as it grows. The texts of models are shown as text, never as a page. The printed address contains a
    key: give it only to people who may read the run.

    \b
    Example:
        agentcore-rl view
        agentcore-rl view http://127.0.0.1:9000
        agentcore-rl view runs/quickstart-20260101-120000 --export run.html
    """
    from ..runs import RunReader, find_run
    from ..view.data import Runs

    given = [find_run(name) for name in runs if not _is_address(name)]
    addresses = [name for name in runs if _is_address(name)]
    if export is not None:
        from ..view.export import export as write

        if addresses or len(given) > 1:
            raise ConfigError("--export writes one run: name one")
        with RunReader(given[0] if given else find_run(None)) as run:
            held, total = write(run, export)
            left = f"; the {total - held} older ones are left out" if held < total else ""
            click.echo(f"{export}: {held} of {total} rollouts{left}")
        return
    from ..view.server import serve

    def ready(url: str) -> None:
        click.echo(f"{url}\nCtrl-C stops.")
        if ready_file is not None:
            write_ready(ready_file, {"url": url})
        if not no_open and sys.stdout.isatty():
            webbrowser.open(url)

    with _gateways(addresses, tokenizer, found=not runs) as gateways:
        shown = Runs(given, None if runs else Path.cwd(), gateways)
        serving = serve(shown, host=host, port=port, allowed_hosts=allowed_hosts, ready=ready, parent_pid=parent_pid)
        try:
            asyncio.run(serving)
        except KeyboardInterrupt:
            sys.exit(130)


def _is_address(name: str) -> bool:
    return name.startswith(("http://", "https://"))


@contextlib.contextmanager
def _gateways(addresses: Sequence[str], tokenizer: Path | None, *, found: bool) -> Iterator[dict[str, Path]]:
    """Folders that follow these gateways, and (``found``) the one that runs in this folder. Raises: GatewayError."""
    from ..errors import GatewayError
    from ..runs import TokenTexts
    from .training.stack import Stack

    if not addresses and Stack.running() is None:
        yield {}
        return
    from ..view.live import GatewayMirror

    stack = Stack.running()
    wanted: dict[str, tuple[str, str | None, Path | None]] = {}
    for number, address in enumerate(addresses):
        name = f"gateway {urlsplit(address).netloc}"
        name = name if name not in wanted else f"{name}~{number}"
        ours = stack is not None and address.rstrip("/") in stack.gateway_url.split(",")
        wanted[name] = (address, None, None)
        if stack is not None and ours:
            wanted[name] = (address, stack.gateway_admin_key, stack.tokenizer)
    if found and stack is not None:
        wanted["gateway of up"] = (stack.gateway_url, stack.gateway_admin_key, stack.tokenizer)
    with contextlib.ExitStack() as exits:
        folders: dict[str, Path] = {}
        for name, (address, key, folder) in wanted.items():
            scratch = Path(exits.enter_context(tempfile.TemporaryDirectory(prefix="agentcore-rl-view-")))
            place = tokenizer or folder
            texts = TokenTexts(place) if place is not None else None
            mirror = GatewayMirror(address, scratch / name.replace(" ", "-"), admin_key=key, texts=texts)
            try:
                mirror.start()
            except GatewayError as e:
                if not found:
                    raise
                click.echo(f"the gateway of `agentcore-rl up` is not shown: {e}", err=True)
                continue
            exits.callback(mirror.stop)
            folders[name] = mirror.folder
        yield folders
