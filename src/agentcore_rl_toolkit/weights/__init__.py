"""Weights from a trainer into inference engines: a checkpoint's folder in, a version out, and the proof that they have arrived.

Names load on first use: importing this package loads no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._lazy import lazy

if TYPE_CHECKING:
    from .arrival import check_arrived as check_arrived
    from .checkpoint import write_checkpoint as write_checkpoint
    from .engines import EngineAddress as EngineAddress
    from .folders import complete_folder as complete_folder
    from .folders import copy_folder as copy_folder
    from .publishing import Publisher as Publisher
    from .publishing import prove as prove
    from .publishing import publish as publish
else:
    __all__, __getattr__, __dir__ = lazy(__name__)
