"""Trainers on one shared core: `GroupStream` and `collect` run groups of rollouts, `to_samples` turns them into training data.

Each trainer has its own folder (`trl`, `slime`, `verl`, `rllm`, `tinker`, `sagemaker`), imported only when asked for.
Names load on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._lazy import lazy

if TYPE_CHECKING:
    from .collection.collect import collect as collect
    from .collection.collect import collect_async as collect_async
    from .collection.credit import Credit as Credit
    from .collection.credit import CreditReport as CreditReport
    from .collection.groups import CollectedRollout as CollectedRollout
    from .collection.groups import CollectStats as CollectStats
    from .collection.groups import Group as Group
    from .collection.groups import GroupRequest as GroupRequest
    from .collection.groups import UsableSteps as UsableSteps
    from .collection.groups import summarize as summarize
    from .collection.recording import Recording as Recording
    from .collection.recording import open_recording as open_recording
    from .collection.samples import Sample as Sample
    from .collection.samples import to_samples as to_samples
    from .collection.settings import CollectConfig as CollectConfig
    from .collection.stream import GroupStream as GroupStream
    from .service import RolloutService as RolloutService
else:
    __all__, __getattr__, __dir__ = lazy(__name__)
