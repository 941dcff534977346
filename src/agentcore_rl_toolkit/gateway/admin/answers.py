"""Answers administrative requests in tasks, which end when their connection does."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec

from ..._servers.tasks import Tasks
from ...errors import AgentCoreRLError, ConfigError, ContractError
from ...messages.errors import RequestError
from ..http.connection import AgentConnection
from ..http.messages import LAST_CHUNK, Request, chunk, error_reply, reply, retry_after, stream_head

log = logging.getLogger(__name__)

Handler = Callable[[Request], Awaitable[Any]]  # returns what `Answers.start` answers with
CALLS_TYPE = b"application/vnd.agentcore-rl.calls"
_to_json = msgspec.json.Encoder().encode


class Answers:
    """Runs the handlers of administrative requests and writes what they return."""

    def __init__(self) -> None:
        self._tasks = Tasks()

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    def start(self, work: Awaitable[Any], conn: AgentConnection, request: Request, *, dialect: str = "chat") -> None:
        """Answer with what `work` returns: a value, its JSON, or pieces of a long answer. It ends when the connection does."""
        conn.task = self._tasks.start(self._run(work, conn, request, dialect))

    async def _run(self, work: Awaitable[Any], conn: AgentConnection, request: Request, dialect: str) -> None:
        try:
            value = await work
            if isinstance(value, AsyncIterator):
                await self._stream(value, conn, request)
            else:
                self.answer(conn, request, value)
        except RequestError as e:
            self.refuse(conn, request, e, dialect=dialect)
        except (ContractError, ConfigError, RecursionError) as e:
            self.refuse(conn, request, RequestError(str(e)), dialect=dialect)
        except (ConnectionResetError, asyncio.CancelledError):
            conn.transport.abort()
        except BaseException as e:  # a panic in the tokenizer's Rust code is no `Exception`
            path, known = request.path.decode("utf-8", "replace"), isinstance(e, AgentCoreRLError)
            log.error("%s failed: %s", path, e, exc_info=None if known else e)
            why = str(e) if known else f"the gateway failed: {type(e).__name__}: {e}"
            self.refuse(conn, request, RequestError(why, kind="internal"), dialect=dialect)
        finally:
            if conn.task is asyncio.current_task():
                conn.task = None

    async def _stream(self, pieces: AsyncIterator[bytes], conn: AgentConnection, request: Request) -> None:
        """Write pieces one by one, with a pause for the agents' calls in between."""
        kind = b"application/json" if request.method == b"GET" else CALLS_TYPE
        conn.write(stream_head(200, ((b"content-type", kind),), keep_alive=request.keep_alive))
        try:
            async for piece in pieces:
                conn.write(chunk(piece))
                await conn.drain()
                await asyncio.sleep(0)
        except Exception as e:  # in the middle of an answer no other answer is possible
            known = isinstance(e, AgentCoreRLError)
            log.error("%s broke off: %s", request.path.decode("utf-8", "replace"), e, exc_info=None if known else e)
            conn.transport.abort()
            return
        conn.task = None
        conn.write(LAST_CHUNK)
        conn.done(keep_alive=request.keep_alive)

    def answer(self, conn: AgentConnection, request: Request, value: Any) -> None:
        conn.task = None
        body = value if isinstance(value, bytes) else _to_json(value)
        conn.write(reply(200, body, keep_alive=request.keep_alive))
        conn.done(keep_alive=request.keep_alive)

    def refuse(self, conn: AgentConnection, request: Request, error: RequestError, *, dialect: str = "chat") -> None:
        """Answer with an error; one that may be over soon says when to ask again."""
        conn.task = None
        headers = retry_after(error)
        conn.write(error_reply(dialect, error, headers=headers, keep_alive=request.keep_alive))
        conn.done(keep_alive=request.keep_alive)
