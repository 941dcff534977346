"""Keys as paths: every key has one path, and the path gives the key back.

A part of a key that is a plain file name stays as it is, so that ordinary tools read the directory. What a file name should not
or cannot hold is escaped:

- a control character, and ``%`` itself, as ``%`` and two hexadecimal digits per byte;
- the first character of a part that starts like a temporary file;
- a part longer than a file name: it goes on in folders below, whose names end in a bare ``%`` where they are not its end.

The rule names fixed characters rather than what Unicode calls printable, because that differs between versions of Python, and
agent and client must find the same file.
"""

from __future__ import annotations

import re

TEMP_PREFIX = ".tmp-"
NAME_BYTES = 255  # of Linux and macOS
_PIECE_BYTES = 240  # leaves room for an escape more and for the mark
_MORE = "%"
_UNSAFE = re.compile(r"[%\x00-\x1f\x7f-\x9f]")
_ESCAPED = re.compile(r"(?:%[0-9A-F]{2})+")


def path_of(key: str) -> str:
    """The path of a key, relative to the store's directory."""
    parts = key.split("/")
    if max(map(len, parts)) <= NAME_BYTES // 4 and TEMP_PREFIX not in key and not _UNSAFE.search(key):
        return key  # nearly all keys: no part can be too long, at 4 bytes a character
    return "/".join(map(_name, parts))


def text_of(name: str) -> tuple[str, bool] | None:
    """The text that a file or folder name stands for, and whether it goes on below; None for a name no store gives."""
    if _MORE not in name:
        return name, False
    more = name.endswith(_MORE)
    try:
        text = _ESCAPED.sub(_decoded, name[:-1] if more else name)
    except UnicodeDecodeError:
        return None
    return text, more


def _name(part: str) -> str:
    escaped = _UNSAFE.sub(_encoded, part)
    if escaped.startswith(TEMP_PREFIX):
        escaped = "%2E" + escaped[1:]
    if len(escaped.encode()) <= NAME_BYTES:
        return escaped
    pieces, size = [""], 0
    for unit in re.findall(r"(?:%[0-9A-F]{2})|.", escaped, re.DOTALL):
        size += len(unit.encode())
        if size > _PIECE_BYTES:
            pieces.append("")
            size = len(unit.encode())
        pieces[-1] += unit
    # a piece from the middle of a name may look like something else by itself
    pieces = ["%2E" + p[1:] if p.startswith(TEMP_PREFIX) or p in (".", "..") else p for p in pieces]
    return f"{_MORE}/".join(pieces)


def _encoded(found: re.Match[str]) -> str:
    return "".join(f"%{byte:02X}" for byte in found[0].encode())


def _decoded(found: re.Match[str]) -> str:
    return bytes.fromhex(found[0].replace("%", "")).decode()
