"""How administrative requests are answered: in tasks, which end when their connection does."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from ...errors import AgentCoreRLError, ConfigError, ContractError
from ..errors import RequestError
from ..http.connection import AgentConnection
from ..http.messages import Request, error_reply, reply, retry_after

log = logging.getLogger(__name__)

Handler = Callable[[AgentConnection, Request], Awaitable[None]]
_to_json = msgspec.json.Encoder().encode


class Answers:
    """See the module."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def run(self, handler: Handler, conn: AgentConnection, request: Request) -> None:
        try:
            await handler(conn, request)
        except RequestError as e:
            self.refuse(conn, request, e)
        except (ContractError, ConfigError) as e:
            self.refuse(conn, request, RequestError(str(e)))
        except (ConnectionResetError, asyncio.CancelledError):
            conn.transport.abort()
        except AgentCoreRLError as e:
            log.error("%s failed: %s", request.path.decode("utf-8", "replace"), e)
            self.refuse(conn, request, RequestError(str(e), kind="internal"))
        except Exception as e:
            log.exception("%s failed", request.path.decode("utf-8", "replace"))
            self.refuse(conn, request, RequestError(f"the gateway failed: {type(e).__name__}: {e}", kind="internal"))
        finally:
            if conn.task is asyncio.current_task():
                conn.task = None

    def answer(self, conn: AgentConnection, request: Request, status: int, value: Any) -> None:
        conn.task = None
        conn.write(reply(status, _to_json(value), keep_alive=request.keep_alive))
        conn.done(keep_alive=request.keep_alive)

    def refuse(self, conn: AgentConnection, request: Request, error: RequestError, *, dialect: str = "chat") -> None:
        """Answer with an error; one that may be over soon says when to ask again."""
        conn.task = None
        headers = retry_after(error)
        conn.write(error_reply(dialect, error, headers=headers, keep_alive=request.keep_alive))
        conn.done(keep_alive=request.keep_alive)

    def start(self, work: Awaitable[None], conn: AgentConnection) -> None:
        """Run an answer as a task that ends when its connection does."""
        task = asyncio.ensure_future(work)
        conn.task = task
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
