"""A stream of finished groups: rollouts run while the trainer trains, within a limit on their age.

How a stream runs. Each group is one collection (`collect_async`), and all share the same places. A further group is started
when a place is free and the trainer will be able to train it in time; a group is handed out when all its rollouts have ended.

How old a rollout may be. Batch t is trained from weight version t. With `max_staleness` S a group whose first rollout started at
version v has to be in batch v + S or an earlier one. Two rules keep this limit without discarding rollouts:

- *Starts are delayed.* At most (S + 1) batches of groups are started and not yet trained, so there is a place in a batch for
  each of them. With S = 0 nothing starts before the last batch is trained: the synchronous loop.
- *The oldest go first.* A batch takes the finished groups that are due soonest. It is handed out only if the later batches have
  room for all groups that are due then. Otherwise, the trainer waits for the slow ones, which is the price of the limit.

Groups without spread. With ``replace_up_to`` = F above 1, a finished group whose usable rewards are all equal is replaced by the
next one of the data, at most (F - 1) batches of them for each batch that is handed out. Its rollouts are masked as "no_spread".
Source: dynamic sampling, DAPO, arXiv:2503.14476.

Every group is one position in the data. `state` holds the positions that are started and not trained: a stream that starts
from it starts these first, so a kill or a slow input loses no prompt.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ...contract import nearly_equal
from .collect import collect_async
from .groups import CollectedRollout, Group, GroupRequest
from .recording import Recording
from .sessions import Places
from .settings import CollectConfig

if TYPE_CHECKING:
    from ...client import RolloutClient
    from ...gateway import GatewayClient

Requests = Callable[[int], GroupRequest | None]


@dataclass(eq=False)
class _Open:
    """A group that is started and not yet handed out. ``since`` is the weight version at its first rollout's start."""

    position: int
    request: GroupRequest
    queued: int
    since: int | None = None
    task: asyncio.Task[None] | None = field(default=None, repr=False)
    group: Group | None = field(default=None, repr=False)


class GroupStream:
    """The groups of ``requests(0)``, ``requests(1)`` and so on as they finish, until a request is None.

    The same position must always give the same request, also after a restart. ``batch_groups`` groups are trained at once and
    make one weight version, ``max_staleness`` versions may lie between a rollout's start and its training. ``weight_version`` is
    the one in place now; ``state`` what an earlier stream's `state()` gave. Rollouts are recorded when they are handed out, as of
    the step that trains them. Nothing starts before the first batch is asked for.

    Use `take_async` for batches, and call `published` on the same event loop when new weights are in place. Leaving the block
    stops what runs. ``replaced`` counts the groups without spread that were replaced, and ``left_out`` are those before the
    last batch.
    """

    def __init__(
        self,
        requests: Requests,
        *,
        client: RolloutClient,
        gateway: GatewayClient | None,
        batch_groups: int,
        max_staleness: int,
        replace_up_to: float = 1.0,
        config: CollectConfig | None = None,
        weight_version: int = 0,
        state: Mapping[str, Any] | None = None,
        on_rollout: Callable[[CollectedRollout], None] | None = None,
        places: Places | None = None,
        recording: Recording | None = None,
    ) -> None:
        config = config or CollectConfig()
        self._may_replace = int((replace_up_to - 1) * batch_groups + 1e-9)  # rounding: 0.4 * 5 may be below 2
        self.batch_groups, self.max_staleness, self.weight_version = batch_groups, max_staleness, weight_version
        self._requests, self._on_rollout, self._recording = requests, on_rollout, recording
        self._config = config
        places = places or Places(config.max_concurrent)
        self._collect = partial(collect_async, client=client, gateway=gateway, config=self._config, places=places)
        state = state or {}
        self._next: int = state.get("next", 0)
        self._again: list[int] = list(state.get("in_flight", ()))  # positions that an earlier stream had started
        self._open: dict[int, _Open] = {}
        self._handed: list[int] = []  # positions that are not yet reported as trained
        self.replaced: int = state.get("replaced", 0)
        self._replaced: dict[int, Group] = {}  # since the last batch, by position
        self.left_out: list[Group] = []
        self._ended = False  # there is no further request
        self._closed = False
        self._failure: BaseException | None = None
        self._moved = asyncio.Event()

    # -- taking -------------------------------------------------------------------------------------------------------

    async def take_async(self) -> list[Group]:
        """Return the next batch in the order of the data: `batch_groups` groups, or fewer at the end of the data.

        Raises: GatewayError and the like when a group's collection cannot continue; the errors of `requests`.
        """
        while True:
            self._moved.clear()
            self._fill()
            if self._failure is not None:
                raise self._failure
            if (batch := self._choose()) is not None:
                return self._hand(batch)
            await self._moved.wait()

    def published(self, weight_version: int) -> None:
        """Mark the last batch as trained. Sampling continues with this version of the weights."""
        self.weight_version = weight_version
        self._handed.clear()
        self._move()

    def state(self) -> dict[str, Any]:
        """Return the state from which a later stream continues after the last trained batch, as JSON values."""
        in_flight = sorted([*self._open, *self._handed, *self._again, *self._replaced])
        return {"next": self._next, "in_flight": in_flight, "replaced": self.replaced - len(self._replaced)}

    # -- starting -----------------------------------------------------------------------------------------------------

    def _move(self) -> None:
        self._fill()
        self._moved.set()

    def _fill(self) -> None:
        """Start groups as long as there is a place and a batch for them."""
        while not (self._closed or self._failure is not None or self._ended):
            if len(self._open) + len(self._handed) >= self.batch_groups * (self.max_staleness + 1):
                return
            if any(opened.queued for opened in self._open.values()):
                return  # all slots are taken: the waiting groups come first
            try:
                self._start()
            except Exception as e:  # an error of the data or the caller; `take_async` raises it
                self._failure = e

    def _start(self) -> None:
        position = self._again[0] if self._again else self._next
        request = self._requests(position)
        if request is None:  # also for a replacement that was in flight, until a group is replaced again
            self._ended = True
            return
        if self._again:
            self._again.pop(0)
        else:
            self._next += 1
        opened = _Open(position=position, request=request, queued=request.n + self._config.extra_rollouts)
        self._open[position] = opened
        opened.task = asyncio.create_task(self._run(opened), name=f"group-{position}")

    async def _run(self, opened: _Open) -> None:
        try:
            (group,) = await self._collect(
                [opened.request], on_rollout=self._on_rollout, on_queued=partial(self._queued, opened)
            )
        except asyncio.CancelledError:
            raise
        except Exception as e:  # the gateway cannot make sessions; `take_async` raises the error
            self._failure = self._failure or e
        else:
            if self._is_replaced(group):
                del self._open[opened.position]
                self.replaced += 1
                masked = [replace(r, mask_reason=r.mask_reason or "no_spread") for r in group.rollouts]
                self._replaced[opened.position] = replace(group, rollouts=masked)
                self._ended = False
            else:
                opened.group = group
        self._move()

    def _is_replaced(self, group: Group) -> bool:
        """Return True if the group teaches nothing, because its rewards are equal, and the next batch may still get others."""
        if self._config.signals.per_token:  # rewards of turns may differ, and a teacher needs no rewards
            return False
        rewards = [reward for reward in group.rewards if reward is not None]
        return len(rewards) > 1 and nearly_equal(rewards) and len(self._replaced) < self._may_replace

    def _queued(self, opened: _Open, queued: int) -> None:
        opened.queued = queued
        if opened.since is None:
            opened.since = self.weight_version
        if not queued:
            self._move()

    # -- handing out --------------------------------------------------------------------------------------------------

    def _choose(self) -> list[_Open] | None:
        """Return the groups of the next batch, or None while it must wait."""
        if self._ended and len(self._open) <= self.batch_groups:
            every = list(self._open.values())
            return every if all(opened.group is not None for opened in every) else None
        done = [opened for opened in self._open.values() if opened.group is not None]
        if len(done) < self.batch_groups:
            return None
        chosen = sorted(done, key=lambda opened: (self._due(opened), opened.position))[: self.batch_groups]
        left = [self._due(opened) for opened in self._open.values() if opened not in chosen]
        for later in range(self.max_staleness + 1):
            if sum(due <= self.weight_version + later for due in left) > later * self.batch_groups:
                return None
        return chosen

    def _due(self, opened: _Open) -> float:
        """Return the last version from which a group may be trained."""
        return math.inf if opened.since is None else opened.since + self.max_staleness

    def _hand(self, chosen: Sequence[_Open]) -> list[Group]:
        batch = []
        for opened in sorted(chosen, key=lambda opened: opened.position):
            assert opened.group is not None
            group = replace(opened.group, rollouts=[self._aged(r) for r in opened.group.rollouts])
            batch.append(group)
            del self._open[opened.position]
            self._handed.append(opened.position)
        for group in [*batch, *self._replaced.values()]:
            self._record(group)
        self.left_out, self._replaced = list(self._replaced.values()), {}
        self._fill()
        return batch

    def _record(self, group: Group) -> None:
        if self._recording is not None:
            where = self._recording.at(self._recording.phase, self.weight_version)
            for rollout in group.rollouts:
                where.add(rollout, group.request, self.weight_version)

    def _aged(self, rollout: CollectedRollout) -> CollectedRollout:
        """Mask a rollout if the engine reports that it sampled from older weights than expected."""
        oldest = rollout.weight_version_min
        if rollout.usable and oldest is not None and oldest < self.weight_version - self.max_staleness:
            return replace(rollout, mask_reason="stale")
        return rollout

    # -- ending -------------------------------------------------------------------------------------------------------

    async def close_async(self) -> None:
        """Stop what runs and delete its sessions. `state` still has what was in flight."""
        self._closed = True
        tasks = [opened.task for opened in self._open.values() if opened.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def __aenter__(self) -> GroupStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, e: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close_async()
