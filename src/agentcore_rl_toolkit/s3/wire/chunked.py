"""``Content-Encoding: aws-chunked``, sans I/O: encoded bytes in, payload bytes out, trailers at hand.

    <hex size>[;extension]\\r\\n <bytes> \\r\\n ... 0\\r\\n [name:value\\r\\n ...] \\r\\n

Source: Amazon S3 API Reference, "Signature calculations for the Authorization header: Transferring payload in multiple chunks
including trailing headers".
"""

from __future__ import annotations

from .errors import S3Error

_LONGEST_LINE = 4096


class ChunkedDecoder:
    """Feed it the body as it comes."""

    def __init__(self) -> None:
        self.trailers: dict[str, str] = {}
        self.finished = False
        self._buffer = bytearray()
        self._left = 0  # payload bytes of the current chunk still to come
        self._state = "size"

    def feed(self, data: bytes) -> bytes:
        """Payload bytes that became available. Raises: S3Error IncompleteBody or InvalidRequest on broken framing."""
        self._buffer += data
        out = bytearray()
        while self._step(out):
            continue
        return bytes(out)

    def end(self) -> None:
        """Tell that the body ended. Raises: S3Error IncompleteBody when it ended too early."""
        if not self.finished:
            raise S3Error("IncompleteBody")

    def _step(self, out: bytearray) -> bool:
        if self._state == "bytes":
            taken = self._buffer[: self._left]
            if not taken:
                return False
            del self._buffer[: len(taken)]
            self._left -= len(taken)
            out += taken
            if self._left == 0:
                self._state = "gap"
            return True
        line = self._line()
        if line is None:
            return False
        if self._state == "gap":
            if line:
                raise S3Error("InvalidRequest", "A chunk of the body is longer than it says.")
            self._state = "size"
        elif self._state == "size":
            self._begin_chunk(line)
        elif self._state == "trailers":
            self._trailer(line)
        else:
            raise S3Error("InvalidRequest", "There are bytes after the end of the chunked body.")
        return True

    def _line(self) -> bytes | None:
        end = self._buffer.find(b"\n")
        if end < 0:
            if len(self._buffer) > _LONGEST_LINE:
                raise S3Error("InvalidRequest", "A line of the chunked body is too long.")
            return None
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return line.removesuffix(b"\r")

    def _begin_chunk(self, line: bytes) -> None:
        size = line.partition(b";")[0]
        try:
            self._left = int(size, 16) if size.strip().isalnum() else -1
        except ValueError:
            self._left = -1
        if self._left < 0:
            raise S3Error("InvalidRequest", "A chunk of the body does not begin with its size.")
        self._state = "bytes" if self._left else "trailers"

    def _trailer(self, line: bytes) -> None:
        if not line:
            self.finished = True
            self._state = "done"
            return
        name, separator, value = line.partition(b":")
        if not separator:
            raise S3Error("InvalidRequest", "A trailing header has no value.")
        self.trailers[name.strip().lower().decode("latin-1")] = value.strip().decode("latin-1")
