"""A container registry on loopback, as far as an engine needs one to push: blobs in one or more pieces, and manifests.

Source: OCI Distribution Specification 1.1, "Pushing". Who pushes has to log in, as at ECR. It answers as a
proxy for plain HTTP, too, so that any name can lead to it.
"""

from __future__ import annotations

import base64
import hashlib
import threading
import uuid
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit


class Registry(ThreadingHTTPServer):
    """``pushed(repository, tag, manifest)`` is called for each manifest that came under a tag."""

    daemon_threads = True

    def __init__(self, password: str, pushed: Callable[[str, str, str], None]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.allowed = "Basic " + base64.b64encode(f"AWS:{password}".encode()).decode()
        self.pushed = pushed
        self.blobs: dict[str, bytes] = {}
        self.uploads: dict[str, bytes] = {}
        self.logins = 0
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"

    def close(self) -> None:
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Registry

    def log_message(self, format: str, *arguments: object) -> None:
        pass

    def _answer(self, status: int, **headers: str) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content_Length": headers.get("Content_Length", "0")}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    def _let_in(self) -> bool:
        if self.headers.get("Authorization") == self.server.allowed:
            return True
        self._body()
        self._answer(401, WWW_Authenticate='Basic realm="registry"')
        return False

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            found = b""
            while size := int(self.rfile.readline().split(b";")[0], 16):
                found += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return found
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def do_GET(self) -> None:
        if self._let_in():
            self.server.logins += 1
            self._answer(200)

    def do_HEAD(self) -> None:
        if self._let_in():
            blob = self.server.blobs.get(self.path.rsplit("/", 1)[1])
            self._answer(404) if blob is None else self._answer(200, Content_Length=str(len(blob)))

    def do_POST(self) -> None:
        if self._let_in():
            self._body()
            upload = uuid.uuid4().hex
            self.server.uploads[upload] = b""
            self._answer(202, Location=f"{urlsplit(self.path).path.rstrip('/')}/{upload}", Range="0-0")

    def do_PATCH(self) -> None:
        if self._let_in():
            path = urlsplit(self.path).path
            upload = path.rsplit("/", 1)[1]
            self.server.uploads[upload] += self._body()
            self._answer(202, Location=path, Range=f"0-{len(self.server.uploads[upload]) - 1}")

    def do_PUT(self) -> None:
        if not self._let_in():
            return
        parts, body = urlsplit(self.path), self._body()
        if "/manifests/" in parts.path:
            name, tag = parts.path.removeprefix("/v2/").split("/manifests/")
            digest = "sha256:" + hashlib.sha256(body).hexdigest()
            self.server.blobs[digest] = body
            self.server.pushed(name, tag, body.decode())
        else:
            blob = self.server.uploads.pop(parts.path.rsplit("/", 1)[1]) + body
            digest = parse_qs(parts.query)["digest"][0]
            if digest != "sha256:" + hashlib.sha256(blob).hexdigest():
                self._answer(400)
                return
            self.server.blobs[digest] = blob
        self._answer(201, Location=parts.path, Docker_Content_Digest=digest)
