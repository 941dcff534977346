"""A server on the loopback address for the model calls of agents in this process, or of programs that it starts.

The addresses have a random part, which authorizes calls. Signatures are not checked: clients of AWS sign with the agent's own
credentials, which other services need.
"""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import uvicorn
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

# A request and the part of its path below the address, as it was sent -> the response.
Answer = Callable[[Request, str], Awaitable[Response]]


class Relay:
    """A server on a free port, in its own thread. `open` gives an address for each function that answers calls."""

    add_rollouts = False

    def __init__(self) -> None:
        self._answers: dict[str, Answer] = {}
        listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = listener.getsockname()[1]
        self._server = uvicorn.Server(uvicorn.Config(self, log_config=None, access_log=False, lifespan="off"))
        run = threading.Thread(target=self._server.run, kwargs={"sockets": [listener]}, name="relay", daemon=True)
        run.start()

    def open(self, answer: Answer) -> str:
        """Answer the calls below a new address, and return it."""
        token = secrets.token_urlsafe(24)
        self._answers[token] = answer
        return f"http://127.0.0.1:{self.port}/{token}"

    def close(self, address: str) -> None:
        """Answer no more calls below an address."""
        del self._answers[address.rpartition("/")[2]]

    def end(self) -> None:
        """End the server."""
        self._server.should_exit = True

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve a request of this process at the address that `open` returned."""
        if scope["type"] != "http":
            return
        request = Request(scope, receive)
        _, token, path = (*scope["raw_path"].decode("latin-1").split("/", 2), "", "")[:3]
        answer = self._answers.get(token)
        if request.headers.get("host") not in (f"127.0.0.1:{self.port}", f"localhost:{self.port}"):
            response = refusal(403, "this server is for the agent's own process")
        elif "origin" in request.headers:
            response = refusal(403, "this server is not for web pages")
        elif answer is None:
            response = refusal(404, "this address does not exist, or the rollout has ended")
        else:
            response = await answer(request, path)
        await response(scope, receive, send)


def refusal(status: int, message: str) -> Response:
    """Return an error response that the clients of OpenAI, Anthropic and AWS read."""
    error = {"type": "invalid_request_error" if status < 500 else "api_error", "message": message}
    return JSONResponse({"type": "error", "error": error, "message": message}, status)
