"""Tasks of asyncio that nobody waits for: the event loop alone does not keep them alive."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


class Tasks(set[asyncio.Task[Any]]):
    """Those that still run."""

    def start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self.add(task)
        task.add_done_callback(self.discard)
        return task
