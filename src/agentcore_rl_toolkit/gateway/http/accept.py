"""Taking connections from a listening socket, many at a time.

The event loops' own servers accept one connection per turn of the loop. When a thousand agents connect to a gateway
whose turns take 50 ms, the last of them would wait most of a minute, with its first request already sent.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

from ..._servers.open_files import EXHAUSTED
from ..._servers.process import url_of

log = logging.getLogger(__name__)

PER_TURN = 256
_REST_S = 1.0  # with no descriptors left, accepting again at once would only burn the core


class Acceptor:
    """Accepts on `listening` and gives every connection a protocol of `factory`, until `close`."""

    def __init__(self, listening: socket.socket, factory: Callable[[], asyncio.BaseProtocol]) -> None:
        listening.setblocking(False)
        self._listening = listening
        self._factory = factory
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._resting: asyncio.TimerHandle | None = None
        self._loop.add_reader(listening.fileno(), self._accept)

    @property
    def url(self) -> str:
        return url_of(self._listening)

    def _accept(self) -> None:
        for _ in range(PER_TURN):
            try:
                sock, _ = self._listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as e:
                if e.errno not in EXHAUSTED:
                    raise
                log.error("no further connection can be accepted for now: %s", e)
                self._loop.remove_reader(self._listening.fileno())
                self._resting = self._loop.call_later(_REST_S, self._go_on)
                return
            sock.setblocking(False)
            task = self._loop.create_task(self._adopt(sock))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _go_on(self) -> None:
        self._resting = None
        self._loop.add_reader(self._listening.fileno(), self._accept)

    async def _adopt(self, sock: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._factory, sock)
        except OSError:  # it hung up on the way
            sock.close()

    def close(self) -> None:
        """Accept nothing more; connections that stand are their protocols' business."""
        if self._resting is not None:
            self._resting.cancel()
        else:
            self._loop.remove_reader(self._listening.fileno())
        self._listening.close()
