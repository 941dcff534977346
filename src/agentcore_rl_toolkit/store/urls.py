"""Store URLs: what they mean, how they are compared, and which store opens them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import quote, unquote

from ..errors import ConfigError
from .base import ObjectStore
from .local import LocalStore  # at import, so that forked sessions do not load it one by one

# S3's general rules. Capitals, underscores and up to 255 characters are in old buckets of us-east-1 only, but they are there.
_BUCKET = re.compile(r"(?!\d+(?:\.\d+){3}$)(?!.*\.\.)[a-zA-Z0-9][a-zA-Z0-9._-]{1,253}[a-zA-Z0-9]")


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreURL:
    """The parts of a store URL. ``prefix`` is empty or ends in ``/``. For files it is the directory, and ``bucket`` is empty."""

    scheme: str
    bucket: str
    prefix: str

    def __str__(self) -> str:
        if self.scheme == "file":
            return "file://" + quote(self.prefix.rstrip("/") or "/")
        return f"{self.scheme}://{self.bucket}" + (f"/{self.prefix.rstrip('/')}" if self.prefix else "")


def parse_url(url_or_bucket: str) -> StoreURL:
    """Read ``s3://bucket[/prefix]``, ``file:///dir``, ``memory://[name]``, or a plain S3 bucket name. Raises: ConfigError."""
    given: object = url_or_bucket  # it may come from a request
    text = given if isinstance(given, str) else ""
    scheme, separator, rest = text.partition("://")
    if not separator:
        scheme, rest = "s3", "" if "/" in text else text
    scheme = scheme.lower()
    path = unquote(rest.removeprefix("localhost")) if scheme == "file" else rest
    bucket, _, below = path.partition("/")
    parts = [part for part in below.split("/") if part]
    usable = {
        "s3": _BUCKET.fullmatch(bucket) is not None,
        "file": path.startswith("/") and "\0" not in path,
        "memory": True,
    }
    if not usable.get(scheme) or {".", ".."} & set(parts):
        raise ConfigError(
            f"{url_or_bucket!r} is not a store: write the name of a bucket, s3://bucket/prefix, file:///absolute/directory or "
            "memory://name, without '.' and '..'"
        )
    prefix = "".join(f"{part}/" for part in parts)
    return StoreURL(scheme=scheme, bucket=bucket, prefix=f"/{prefix}" if scheme == "file" else prefix)


def open_store(url_or_bucket: str, *, region: str | None = None, default_region: str | None = None) -> ObjectStore:
    """Open the store of a URL or plain bucket name. Nothing is contacted before its first operation.

    Args:
        region: of an S3 bucket, if it is known.
        default_region: of S3, if neither the environment nor the AWS configuration has one.
    Raises: ConfigError on a URL that cannot be read.
    """
    url = parse_url(url_or_bucket)
    if url.scheme == "file":
        return LocalStore(str(url), url.prefix)
    if url.scheme == "memory":
        from .memory import MemoryStore

        return MemoryStore(str(url), url.bucket, url.prefix)
    from .remote import RemoteStore

    place = {"bucket": url.bucket, "prefix": url.prefix}
    return RemoteStore(str(url), **place, region=region, default_region=default_region)


def url_matches(url_or_bucket: str, patterns: Iterable[str]) -> bool:
    """Return True if a store is within one of the patterns.

    A pattern is a bucket name or store URL and covers everything below it (``s3://b/team`` covers ``s3://b/team/run`` but not
    ``s3://b/teams``); ``*`` stands for any characters inside one bucket name or path.

    Raises: ConfigError when the URL or a pattern cannot be read.
    """
    subject = str(parse_url(url_or_bucket)).rstrip("/")
    for pattern in patterns:
        pattern = pattern.strip()
        if not pattern:
            continue
        if "*" not in pattern:
            pattern = str(parse_url(pattern))
        elif "://" not in pattern:
            pattern = "s3://" + pattern
        within = re.escape(pattern.rstrip("/")).replace(r"\*", "[^/]*")
        if re.fullmatch(f"{within}(/.*)?", subject, re.DOTALL):
            return True
    return False
