"""Answers that are not there yet: every request to sample or train gets an id at once, and its result is fetched by that."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from .listening import JSON, Answer

log = logging.getLogger(__name__)


@dataclass
class Promise:
    """A result to come: its body and content type. `drop_after` breaks every delivery after so many bytes."""

    result: asyncio.Future[tuple[bytes, str]]
    drop_after: int | None = None

    def keep(self, body: bytes, content_type: str = JSON) -> None:
        if not self.result.done():
            self.result.set_result((body, content_type))

    def fail(self, message: str, *, category: str = "user") -> None:
        """The request failed. Whose fault it was: the client's ("user") or the service's ("server")."""
        self.keep(json.dumps({"error": message, "category": category}).encode())

    def broke(self, error: Exception) -> None:
        """The request failed by what nobody foresaw: it is told like any other failure, or its client waits for ever."""
        log.error("a request failed", exc_info=error)
        self.fail(f"{type(error).__name__}: {error}", category="server")


class Promises:
    """All promises of a service, and the tasks that keep them."""

    def __init__(self) -> None:
        self._made: dict[str, Promise] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    def make(self, request_id: str, *, drop_after: int | None = None) -> Promise:
        made = self._made[request_id] = Promise(asyncio.get_running_loop().create_future(), drop_after)
        return made

    def find(self, request_id: str) -> Promise | None:
        return self._made.get(request_id)

    async def retrieve(self, request_id: str, *, hold_s: float) -> Answer:
        """The result, waited for up to `hold_s`; then "try again"."""
        promise = self._made.get(request_id)
        if promise is None:
            return refuse(410, f"there is no request {request_id!r}")
        done, _ = await asyncio.wait({promise.result}, timeout=hold_s)
        if not done:
            pending = {"type": "try_again", "request_id": request_id, "queue_state": "active"}
            return Answer(status=408, body=json.dumps(pending).encode())
        data, kind = promise.result.result()
        return Answer(body=data, content_type=kind, drop_after=promise.drop_after)

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def stop(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def refuse(status: int, message: str, headers: tuple[tuple[str, str], ...] = ()) -> Answer:
    return Answer(status=status, body=json.dumps({"detail": message}).encode(), headers=headers)
