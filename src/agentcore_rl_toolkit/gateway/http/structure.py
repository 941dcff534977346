"""How many Python objects a JSON text would become, counted before any of them is made.

Decoding and checking cost about a microsecond for a member, a list or an object, whatever its size in bytes; five million of
them fit into 64 MB, and the event loop would stand still for half a minute. Text costs next to nothing: a megabyte of prose,
an image or a tool's result is one string. So the parts are counted and bounded, and the size has its own bound.

A message has about ten parts and a tool fifty; 128,000 tokens of conversation have 6,000 to 40,000.
"""

from __future__ import annotations

from ...errors import CaptureError
from ...messages.errors import RequestError

PARTS = 150_000  # lists, objects and members of a request
REPLY_PARTS = 4_000_000  # of an engine's reply, which has five for each token with its logprob
STRINGS = 500_000  # names of members included; of a reply as many times more
ITEMS = 2_000_000  # of lists and objects: the token ids of a prompt may be a million
ESCAPES = 4_000_000  # backslashes; a text that is nothing else takes ten times as long to read

SMALL = 2**18  # bytes; what fits in here is decoded in less than 0.1 s whatever it is
_CHUNK = 2**20
_ALL = bytes(range(256))
_PLAIN = _ALL.translate(None, b"{[:,\\")
_NO_STRUCTURE = _ALL.translate(None, b'{[:,"')


def check_structure(body: bytes) -> None:
    """Nothing, for a request that may be decoded on the event loop. Cost: a passage over it at memory speed.

    Raises: RequestError (413) that names the bound.
    """
    found = too_much(body, PARTS)
    if found is not None:
        raise RequestError(f"the request body has more than {found}; send less at a time", kind="too_large")


def check_reply(body: bytes) -> None:
    """The same for an engine's reply. Raises: CaptureError."""
    found = too_much(body, REPLY_PARTS)
    if found is not None:
        raise CaptureError(f"the engine's reply has more than {found}")


def too_much(body: bytes, most: int) -> str | None:
    """The bound that a JSON text exceeds, in words; ``most`` parts are allowed."""
    if len(body) <= SMALL:
        return None
    counted = 0
    for at in range(0, len(body), _CHUNK):
        counted += len(body[at : at + _CHUNK].translate(None, _PLAIN))
        if counted > most:  # most bodies have fewer of these bytes, although their texts are full of them
            return _counted(body, most)
    return None


def _counted(body: bytes, most: int) -> str | None:
    """Count what stands outside of strings, up to the first bound."""
    times = max(1, most // PARTS)
    parts = quotes = items = escapes = at = 0
    while at < len(body):
        end = _unescaped(body, at + _CHUNK)
        text = body[at:end]
        at = end
        if b"\\" in text:  # escapes stand in strings only; without them a quote is one that begins or ends a string
            escapes += text.count(b"\\")
            if escapes > ESCAPES * times:
                return f"{ESCAPES * times:,} escaped characters"
            text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
        kept = text.translate(None, _NO_STRUCTURE)
        inside = quotes % 2
        quotes += kept.count(b'"')
        if quotes > 2 * STRINGS * times:
            return f"{STRINGS * times:,} strings"
        outside = b"".join(kept.split(b'"')[inside::2])
        commas = outside.count(b",")
        items += commas
        parts += len(outside) - commas
        if parts > most:
            return f"{most:,} lists, objects and members"
        if items > ITEMS * times:
            return f"{ITEMS * times:,} items of lists and objects"
    return None


def _unescaped(body: bytes, at: int) -> int:
    """The next place from here that does not part a backslash from what it escapes."""
    while at < len(body) and body[at - 1 : at] == b"\\":
        at += 1
    return at
