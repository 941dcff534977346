"""The XML that S3 speaks: small documents out, three kinds of documents in."""

from __future__ import annotations

import re
from collections.abc import Iterable
from urllib.parse import quote
from xml.etree import ElementTree

from ..._servers.host_check import Refusal
from .errors import S3Error

NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"
HEADER = '<?xml version="1.0" encoding="UTF-8"?>\n'
_SPECIAL = re.compile("[&<>\"'\x00-\x1f]")
_NAMED = {"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&apos;"}


def escape(text: str) -> str:
    """Text as element content. Control characters become references, as S3 does, although XML 1.0 has no place for them."""
    if _SPECIAL.search(text) is None:
        return text
    return _SPECIAL.sub(lambda m: _NAMED.get(m[0]) or f"&#x{ord(m[0]):x};", text)


def url_encode(text: str) -> str:
    """What ``encoding-type=url`` asks for; spaces as ``%20``, which every decoder reads back."""
    return quote(text, safe="/~-._")


def element(name: str, value: str | int | None) -> str:
    """``<name>value</name>``; nothing for None."""
    return "" if value is None else f"<{name}>{escape(str(value))}</{name}>"


def document(name: str, parts: Iterable[str]) -> bytes:
    return f'{HEADER}<{name} xmlns="{NAMESPACE}">{"".join(parts)}</{name}>'.encode()


_REFUSED = {408: "RequestTimeout", 431: "RequestHeaderSectionTooLarge"}


def refusal_document(refusal: Refusal) -> tuple[list[tuple[bytes, bytes]], bytes]:
    """Headers and body of the response to a request that never reached the endpoint."""
    parts = [element("Code", _REFUSED.get(refusal.status, "AccessDenied")), element("Message", refusal.message)]
    return [(b"content-type", b"application/xml")], f"{HEADER}<Error>{''.join(parts)}</Error>".encode()


def parse(body: bytes, root: str) -> ElementTree.Element:
    """Parse a request document whose root is ``root``, namespaces removed. Raises: S3Error MalformedXML."""
    # No request of S3 has a document type; refusing it refuses entity expansion. In UTF-16 it would look different.
    if b"<!" in body or b"\0" in body:
        raise S3Error("MalformedXML")
    try:
        tree = ElementTree.fromstring(body, ElementTree.XMLParser(encoding="utf-8"))
    except (ElementTree.ParseError, ValueError, LookupError):
        raise S3Error("MalformedXML") from None
    for node in tree.iter():
        node.tag = node.tag.rpartition("}")[2]
    if tree.tag != root:
        raise S3Error("MalformedXML")
    return tree
