"""Conditional requests: when an object may be read, replaced or deleted. Pure.

Source: RFC 9110 §13; Amazon S3 User Guide, "Conditional requests".
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC
from email.utils import parsedate_to_datetime

from .disk import StoredObject
from .wire.errors import S3Error


def _matches(header: str, etag: str) -> bool:
    tags = [t.strip().removeprefix("W/").strip('"') for t in header.split(",")]
    return "*" in tags or etag in tags


def _seconds(header: str | None) -> float | None:
    """A date header in unix seconds; None when absent or unreadable, which by the RFC means it is ignored."""
    if header is None:
        return None
    try:
        when = parsedate_to_datetime(header)
    except ValueError:
        return None
    return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()


def may_read(headers: Mapping[str, str], stored: StoredObject, prefix: str = "") -> bool:
    """Whether to send the object; False means 304 Not Modified. Raises: S3Error PreconditionFailed.

    ``prefix`` is put before the header names (``x-amz-copy-source-``).
    """
    modified = int(stored.modified_s)
    match, none_match = headers.get(f"{prefix}if-match"), headers.get(f"{prefix}if-none-match")
    if match is not None:
        if not _matches(match, stored.etag):
            raise S3Error("PreconditionFailed", Condition="If-Match")
    elif (since := _seconds(headers.get(f"{prefix}if-unmodified-since"))) is not None and modified > since:
        raise S3Error("PreconditionFailed", Condition="If-Unmodified-Since")
    if none_match is not None:
        return not _matches(none_match, stored.etag)
    since = _seconds(headers.get(f"{prefix}if-modified-since"))
    return since is None or modified > since


def check_write(headers: Mapping[str, str], stored: StoredObject | None) -> None:
    """Refuse a write whose condition does not hold now. Raises: S3Error PreconditionFailed, NoSuchKey, NotImplemented."""
    none_match, match = headers.get("if-none-match"), headers.get("if-match")
    if none_match is not None:
        if none_match != "*":
            raise S3Error("NotImplemented", Header="If-None-Match")
        if stored is not None:
            raise S3Error("PreconditionFailed", Condition="If-None-Match")
    if match is not None:
        if stored is None:
            raise S3Error("NoSuchKey")
        if not _matches(match, stored.etag):
            raise S3Error("PreconditionFailed", Condition="If-Match")


def byte_range(header: str | None, size: int) -> tuple[int, int] | None:
    """First byte and length that a Range header selects; None to send everything (absent, several ranges, or not understood).

    Raises: S3Error InvalidRange.
    """
    if header is None or not header.startswith("bytes=") or "," in header:
        return None
    first, separator, last = header[6:].strip().partition("-")
    if not separator or not (first or last) or not (first + last).isdecimal():
        return None
    if not first:
        length = min(int(last), size)
        if length == 0:
            raise S3Error("InvalidRange", RangeRequested=header, ActualObjectSize=str(size))
        return size - length, length
    if last and int(last) < int(first):
        return None
    if int(first) >= size:
        raise S3Error("InvalidRange", RangeRequested=header, ActualObjectSize=str(size))
    return int(first), min(int(last), size - 1) - int(first) + 1 if last else size - int(first)
