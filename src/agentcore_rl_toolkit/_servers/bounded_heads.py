"""uvicorn's HTTP protocol with a bound on the heads of requests. httptools itself has none."""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 1024  # two reads may exceed it


class BoundedHeads(HttpToolsProtocol):
    """Answers 400 to a request with a head above the bound, and closes the connection."""

    _in_head = False
    _head_bytes = 0

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._head_bytes = True, 0

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        continued = self._in_head
        super().data_received(data)
        self._head_bytes += len(data) if continued else 0
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES:
            self.send_400_response(f"The head of a request has at most {MAX_HEAD_BYTES} bytes.")
