"""Servers on the loopback address in an agent's process."""

from __future__ import annotations

import socket
import threading
from typing import Any

import uvicorn


def serve(app: Any, name: str) -> tuple[int, uvicorn.Server]:
    """Serve an ASGI app on a free port, in a thread. Returns the port, and the server, which ends on ``should_exit``."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, lifespan="off"))
    threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name=name, daemon=True).start()
    return listener.getsockname()[1], server
