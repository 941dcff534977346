"""What a caller may do that is not everything: reach the objects that were granted to it, and write records once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from .wire.errors import S3Error
from .wire.request import Request


@dataclass(frozen=True, kw_only=True)
class Scope:
    """The objects of one caller. ``granted``: whether an object is its own; ``once``: whether a key is written only once.

    ``prefixes`` (``bucket/prefix/``): below these it may do everything, listing included.
    """

    granted: Callable[[str, str], bool]
    once: Callable[[str], bool]
    prefixes: tuple[str, ...] = ()

    def check(self, request: Request) -> None:
        """Raises: S3Error AccessDenied. A record's write is made to fail where there is one."""
        bucket, key, method = request.bucket, request.key, request.method
        copied = request.headers.get("x-amz-copy-source")
        if key and self._is_below(bucket, key) and (copied is None or self._is_below("", copied.lstrip("/"))):
            return
        if bucket and not key and method == "GET" and self._is_below(bucket, request.query.get("prefix", "")):
            return
        if not key or copied is not None or not self.granted(bucket, key):
            raise _denied()
        if not self.once(key):
            return
        if method == "DELETE" and "uploadId" not in request.query:
            raise _denied("a session may not delete a record")
        if method in ("PUT", "POST"):
            if "if-match" in request.headers:
                raise _denied("a session may not replace a record")
            request.headers["if-none-match"] = "*"

    def _is_below(self, bucket: str, key: str) -> bool:
        path = f"{bucket}/{key}" if bucket else key
        return any(path.startswith(prefix) for prefix in self.prefixes) and ".." not in path.split("/")


class Access(Protocol):
    """Says who calls, where requests need not be signed with one of the server's own keys."""

    def secrets_of(self, access_key: str) -> Mapping[str, str]:
        """The secret of a key that is limited; empty for one that is not known."""

    async def scope(self, asgi_scope: Mapping[str, Any], access_key: str) -> Scope | None:
        """What the caller may do; ``access_key`` is the one that it has signed with, empty where that was not checked.

        None: everything. Raises: S3Error AccessDenied.
        """


def _denied(why: str = "a session may reach its own record only") -> S3Error:
    return S3Error("AccessDenied", f"Access Denied: {why}; --session-store BUCKET/PREFIX opens more to all sessions")
