"""Runs an unmodified agent script as ``__main__`` and takes over at the point where it would start its server."""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import os
import socket
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...isolation.project import Project

AGENT_PORTS = (8080, 8000, 9000)  # ports of the HTTP, MCP and A2A contracts
TakeOver = Callable[[Any, dict[str, Any]], None]


class ScriptEndedError(Exception):
    """The script came to its end without starting a server, or cannot start one."""


def run_script(path: str, take_over: TakeOver, serve_here: Callable[[], socket.socket] | None = None) -> None:
    """Execute the file as ``__main__``; ``uvicorn.run(app, **options)`` becomes ``take_over(app, options)``.

    A script that makes a ``uvicorn.Server`` of its own cannot be stopped at that point. With ``serve_here`` it gets the listening
    socket that function returns instead of its port, without it such a server is refused.

    The file is a module of its package, as with `python -m`. Where it makes an app and does not run it, that app is run.

    Raises: ScriptEndedError when the file starts no server; whatever the file raises.
    """
    project = Project.of(Path(path))
    sys.path[:0] = project.import_paths  # before the import of the server, which may lie next to the script
    try:
        import uvicorn
    except ModuleNotFoundError as e:
        raise ScriptEndedError(
            f"the agent's environment ({sys.prefix}) has no server; add bedrock-agentcore to its dependencies"
        ) from e

    if os.environ.get("AGENTCORE_RL_AS_IS"):  # serve an agent without a rollout function as it is
        with contextlib.suppress(ModuleNotFoundError):  # the published toolkit, whose agents take rollouts themselves
            importlib.import_module("agentcore_rl_toolkit.app.deployed.start").prepare()
    bind, startup = socket.socket.bind, uvicorn.Server.startup
    served_here = False

    def refuse_other_servers(self: Any, address: Any) -> None:
        if self.family in (socket.AF_INET, socket.AF_INET6) and address[1] in AGENT_PORTS:
            way = "run it as a container image (agentcore-rl runtime deploy --image)"
            raise ScriptEndedError(f"{path} serves port {address[1]} without uvicorn: {way}")
        bind(self, address)

    def run(app: Any, **options: Any) -> None:
        socket.socket.bind = bind  # type: ignore[method-assign]  # other ports are allowed, too
        take_over(app, options)

    async def start(self: Any, sockets: Any = None) -> None:
        nonlocal served_here
        socket.socket.bind = bind  # type: ignore[method-assign]
        if sockets is not None:  # ours already
            await startup(self, sockets)
        elif serve_here is None:
            take_over(self.config.app, {})  # refuses: an event loop is running
        else:
            served_here = True
            await startup(self, [serve_here()])

    socket.socket.bind = refuse_other_servers  # type: ignore[method-assign]
    uvicorn.Server.startup = start  # type: ignore[method-assign]
    uvicorn.run = run  # looked up at call time by BedrockAgentCoreApp.run and by most scripts
    main = types.ModuleType("__main__")
    main.__file__ = path
    main.__builtins__ = __builtins__  # type: ignore[attr-defined]
    sys.modules["__main__"] = main
    if project.package:
        importlib.import_module(project.package)
        main.__package__ = project.package
        main.__spec__ = importlib.machinery.ModuleSpec(project.module, None, origin=path)
    sys.argv = [path]
    with open(path, "rb") as f:
        code = compile(f.read(), path, "exec")
    try:
        exec(code, main.__dict__)
        if not served_here:
            _run_app(main)
    finally:
        socket.socket.bind = bind  # type: ignore[method-assign]
    if not served_here:
        raise ScriptEndedError(
            f"{path} ended without starting a server; it should finish with\n\n"
            '    if __name__ == "__main__":\n        app.run()\n'
        )


def _run_app(main: types.ModuleType) -> None:
    """Run the ASGI app that a script did not run. This is the app named `app`, otherwise the only one."""
    apps = {
        id(value): value
        for value in main.__dict__.values()
        if any(parent.__name__ == "Starlette" for parent in type(value).__mro__)
    }
    app = apps.get(id(main.__dict__.get("app"))) or (next(iter(apps.values())) if len(apps) == 1 else None)
    if app is not None:
        app.run() if hasattr(app, "run") else sys.modules["uvicorn"].run(app)
