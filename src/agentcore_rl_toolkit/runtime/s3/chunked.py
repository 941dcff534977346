"""``Content-Encoding: aws-chunked``, sans I/O: encoded bytes in, payload bytes out, trailers and chunk signatures at hand.

    <hex size>[;chunk-signature=<64 hex>]\\r\\n <bytes> \\r\\n ... 0[;chunk-signature=...]\\r\\n [name:value\\r\\n ...] \\r\\n

Source: Amazon S3 API Reference, "Signature calculations for the Authorization header: Transferring payload in multiple chunks"
and "... including trailing headers".
"""

from __future__ import annotations

from collections.abc import Callable

from .errors import S3Error

_LONGEST_LINE = 4096
CheckChunk = Callable[[bytes, str], None]


class ChunkedDecoder:
    """Feed it the body as it comes. ``check_chunk(payload, signature)`` is called for each signed chunk, the last one included.

    With ``check_chunk`` a chunk's bytes are handed out only after its signature was checked.
    """

    def __init__(self, check_chunk: CheckChunk | None = None) -> None:
        self.trailers: dict[str, str] = {}
        self.trailer_text = b""  # as it is signed: "name:value\n" per trailer, without the signature
        self.finished = False
        self._check = check_chunk
        self._buffer = bytearray()
        self._left = 0  # payload bytes of the current chunk still to come
        self._held = bytearray()
        self._signature = ""
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
            if self._check is None:
                out += taken
            else:
                self._held += taken
            if self._left == 0:
                self._end_chunk(out)
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
            self._begin_chunk(line, out)
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

    def _begin_chunk(self, line: bytes, out: bytearray) -> None:
        size, *extensions = line.split(b";")
        try:
            self._left = int(size, 16) if size.strip().isalnum() else -1
        except ValueError:
            self._left = -1
        if self._left < 0:
            raise S3Error("InvalidRequest", "A chunk of the body does not begin with its size.")
        self._signature = ""
        for extension in extensions:
            name, _, value = extension.strip().partition(b"=")
            if name == b"chunk-signature":
                self._signature = value.decode("latin-1")
        if self._left:
            self._state = "bytes"
        else:
            self._end_chunk(out)
            self._state = "trailers"

    def _end_chunk(self, out: bytearray) -> None:
        if self._check is not None:
            self._check(bytes(self._held), self._signature)
            out += self._held
            self._held.clear()

    def _trailer(self, line: bytes) -> None:
        if not line:
            self.finished = True
            self._state = "done"
            return
        name, separator, value = line.partition(b":")
        if not separator:
            raise S3Error("InvalidRequest", "A trailing header has no value.")
        key = name.strip().lower().decode("latin-1")
        self.trailers[key] = value.strip().decode("latin-1")
        if key != "x-amz-trailer-signature":
            self.trailer_text += key.encode("latin-1") + b":" + value.strip() + b"\n"
