"""Two connections that hand each other's bytes on, with back pressure. Standard library only, Python 3.10."""

from __future__ import annotations

import asyncio

HIGH_WATER = 256 * 1024  # bytes waiting towards a slow side before the fast side is paused


class Pipe(asyncio.Protocol):
    """One end of a carried connection; what it reads goes to ``other``, which pauses it when its buffer is full."""

    transport: asyncio.Transport
    other: Pipe | None = None
    ended = False  # its peer sends nothing more

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        self.transport.set_write_buffer_limits(high=HIGH_WATER)

    def data_received(self, data: bytes) -> None:
        if self.other is not None:
            self.other.transport.write(data)

    def eof_received(self) -> bool:
        self.ended = True
        if self.other is None or self.other.ended:
            return False  # both directions are done: close, and with it the other end
        if self.other.transport.can_write_eof():
            self.other.transport.write_eof()
        return True  # half-closed: the answer may still be on its way

    def connection_lost(self, error: Exception | None) -> None:
        if self.other is not None:
            other, self.other = self.other, None
            other.other = None
            other.transport.close()

    def pause_writing(self) -> None:
        if self.other is not None and not self.other.transport.is_closing():
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None and not self.other.transport.is_closing():
            self.other.transport.resume_reading()
