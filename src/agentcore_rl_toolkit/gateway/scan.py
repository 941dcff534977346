"""The compiled reader of replies, where it could be built, and what stands in for it elsewhere.

`_scan.c` turns the numbers of a reply into packed arrays several times as fast as building a Python object for each. It is
built when the package is installed and there is a C compiler. Without it `lift` and `lift_events` decline every reply,
which decoders then read whole: slower, with the same result. ``AGENTCORE_RL_PURE=1`` leaves it out.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

__all__ = ["COMPILED", "Run", "find_end", "lift", "lift_events"]

Run = tuple[int, bytes | None, bytes | None, bool, bytes]  # see `lift_events` in `_scan.c`


def _decline(reply: bytes, /) -> None:
    return None


_FINISH = re.compile(rb'"finish_reason"[ \n\r\t]*:[ \n\r\t]*"')
_DONE = re.compile(rb"data: ?\[DONE\]")


def _find_end(data: bytes, finish: bool, /) -> int:
    end = (_FINISH.search(data) if finish else None) or _DONE.search(data)
    return -1 if end is None else end.start()


if TYPE_CHECKING:
    from ._scan import find_end, lift, lift_events

    COMPILED = True
else:
    try:
        if os.environ.get("AGENTCORE_RL_PURE"):
            raise ImportError("left out by AGENTCORE_RL_PURE")
        from ._scan import find_end, lift, lift_events

        COMPILED = True
    except ImportError:
        find_end, lift, lift_events = _find_end, _decline, _decline
        COMPILED = False
