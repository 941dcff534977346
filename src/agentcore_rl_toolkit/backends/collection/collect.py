"""Collect groups of rollouts: the one engine under every trainer.

How a batch runs. Sessions are made at the gateway in bulk. Each rollout is one task that waits for a free place,
submits, and waits for its record, every step under a deadline; waiting for a place or for the client's pace is limited by
standstill only, because it says nothing about the rollout. When a record is in (or the rollout failed), the
session joins a queue; a single fetcher takes everything that waits there in one bulk call, closing the sessions so
that no late turn can arrive, and judges each rollout: outcome, reward, trajectory, age. The judgement decides early
stopping, so "enough usable rollouts" means really usable ones. At the end, whatever happened, live rollouts are
cancelled and all sessions of the batch are deleted.

A failed rollout is data. Only what makes the whole batch pointless raises: bad arguments, and a gateway that cannot
even make the sessions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ...errors import ConfigError
from .._portal import run_sync
from .engine import Engine
from .groups import (
    CollectConfig,
    CollectedRollout,
    CollectStats,
    Group,
    GroupRequest,
    check_usable,
    summarize,
    with_rewards,
)
from .places import Places
from .recording import Recording, open_recording

if TYPE_CHECKING:
    from ...client import RolloutClient
    from ...gateway import GatewayClient

__all__ = [
    "CollectConfig",
    "CollectStats",
    "CollectedRollout",
    "Group",
    "GroupRequest",
    "Places",
    "Recording",
    "check_usable",
    "collect",
    "collect_async",
    "open_recording",
    "summarize",
    "with_rewards",
]


def collect(requests: Sequence[GroupRequest], **arguments: Any) -> list[Group]:
    """`collect_async` for synchronous callers (trainers' rollout hooks); same arguments and result."""
    return run_sync(collect_async(requests, **arguments))


async def collect_async(
    requests: Sequence[GroupRequest],
    *,
    client: RolloutClient,
    gateway: GatewayClient | None,
    config: CollectConfig | None = None,
    weight_version: int | None = None,
    on_rollout: Callable[[CollectedRollout], None] | None = None,
    on_queued: Callable[[int], None] | None = None,
    places: Places | None = None,
    recording: Recording | None = None,
) -> list[Group]:
    """Run every request's rollouts and return one `Group` per request, in request order.

    `weight_version` is the version training will start from; with `config.max_staleness` set, rollouts whose oldest
    sampled token lies further behind are masked. Without a gateway there are no trajectories, and usable means `ok`
    with a reward. `places` are shared by collections that run at the same time; None allows this one
    `config.max_concurrent`. `recording` writes each rollout to a run's folder.
    `on_rollout`, and `on_queued` with the number of rollouts that have not started, are called on the event loop. Cancelling
    this coroutine stops the rollouts that are running and deletes the batch's sessions.

    Raises: ConfigError on bad arguments; GatewayError when the sessions cannot be made (nothing was started then).
    """
    config = config or CollectConfig()
    doubled = sorted(i for i, n in Counter(r.input_id for r in requests).items() if n > 1)
    if doubled:
        raise ConfigError(f"input ids must differ between groups of one batch; given twice: {', '.join(doubled[:5])}")
    if config.max_staleness is not None and weight_version is None:
        raise ConfigError("max_staleness needs weight_version, the version that training starts from")
    if config.max_staleness is not None and gateway is None:
        raise ConfigError("max_staleness needs a gateway: only captured turns know their weight version")
    if not requests:
        return []
    return await Engine(
        requests, client, gateway, config, weight_version, on_rollout, on_queued, places, recording
    ).run()
