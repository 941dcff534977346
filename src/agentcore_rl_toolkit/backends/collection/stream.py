"""A stream of finished groups: rollouts run while the trainer trains, within a limit on their age.

How a stream runs. Each group is a collection of its own (`collect_async`), all share the same places. A further group is started
when a place is free and the trainer will be able to train it in time; a group is handed out when all its rollouts have ended.

How old a rollout may be. Batch t is trained from weight version t. With `max_staleness` S a group whose first rollout started at
version v has to be in batch v + S or an earlier one. Two rules keep that without throwing anything away:

- *Starts are held back.* At most (S + 1) batches of groups are started and not yet trained, so there is a place in a batch for
  each of them. With S = 0 nothing starts before the last batch is trained: the synchronous loop.
- *The oldest go first.* A batch takes the finished groups that are due soonest. It is handed out only if the later batches have
  room for all groups that are due then; else the trainer waits for the slow ones, which is the price of the limit.

Groups without spread. With ``replace_up_to`` = F above 1, a finished group whose usable rewards are all equal is replaced by the
next one of the data, at most (F - 1) batches of them for each batch that is handed out. Its rollouts are masked as "no_spread".
Source: dynamic sampling, DAPO, arXiv:2503.14476.

Every group is one position in the data. `state` holds the positions that are started and not trained: a stream that is made
from it starts these first, so neither a kill nor a slow input costs a prompt.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ...contract import nearly_equal
from ...errors import ConfigError
from .._portal import run_sync
from .collect import collect_async
from .groups import CollectConfig, CollectedRollout, Group, GroupRequest
from .places import Places
from .recording import Recording

if TYPE_CHECKING:
    from ...client import RolloutClient
    from ...gateway import GatewayClient

Requests = Callable[[int], GroupRequest | None]


@dataclass(frozen=True, kw_only=True)
class StreamAccounts:
    """Counts of a stream's rollouts: ``started`` is the sum of ``trained``, ``masked`` and ``in_flight``.

    ``in_flight`` are those that run, wait, or are in a batch that is not yet reported as trained. ``restarted`` counts rollouts
    that a resumed stream had to start again; their first attempts count nowhere else.
    """

    trained: int
    masked: Mapping[str, int]
    in_flight: int
    restarted: int

    @property
    def started(self) -> int:
        return self.trained + sum(self.masked.values()) + self.in_flight


@dataclass(eq=False)
class _Open:
    """A group that is started and not yet handed out. ``since`` is the weight version at its first rollout's start."""

    position: int
    request: GroupRequest
    size: int
    queued: int
    since: int | None = None
    task: asyncio.Task[None] | None = field(default=None, repr=False)
    group: Group | None = field(default=None, repr=False)


class _Accounts:
    """Where each group of a stream is. Synchronous trainers report from another thread than the stream runs on."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self.next: int = state.get("next", 0)
        self.again: list[int] = list(state.get("in_flight", ()))  # positions that an earlier stream had started
        self.trained: int = state.get("trained", 0)
        self.masked: Counter[str] = Counter(state.get("masked", {}))
        self.replaced: int = state.get("replaced", 0)
        self.restarted: int = state.get("restarted", 0) + state.get("in_flight_rollouts", 0)
        self.open: dict[int, _Open] = {}
        self.handed: list[tuple[_Open, Group]] = []  # not yet reported as trained
        self._lock = threading.RLock()

    def started(self, opened: _Open) -> None:
        with self._lock:
            if self.again:
                self.again.pop(0)
            else:
                self.next += 1
            self.open[opened.position] = opened

    def handed_out(self, opened: _Open, group: Group) -> None:
        with self._lock:
            del self.open[opened.position]
            self.handed.append((opened, group))

    def without_spread(self, opened: _Open, group: Group) -> list[CollectedRollout]:
        """Count a group as replaced. Returns its rollouts, the usable ones masked."""
        masked = [replace(r, mask_reason=r.mask_reason or "no_spread") for r in group.rollouts]
        with self._lock:
            del self.open[opened.position]
            self.replaced += 1
            self.masked.update(str(r.mask_reason) for r in masked)
        return masked

    def all_trained(self) -> None:
        """Count the groups handed out as trained."""
        with self._lock:
            for _, group in self.handed:
                for rollout in group.rollouts:
                    if rollout.mask_reason is None:
                        self.trained += 1
                    else:
                        self.masked[rollout.mask_reason] += 1
            self.handed.clear()

    def now(self) -> StreamAccounts:
        with self._lock:
            sizes = [opened.size for opened in (*self.open.values(), *(opened for opened, _ in self.handed))]
            return StreamAccounts(
                trained=self.trained, masked=dict(self.masked), in_flight=sum(sizes), restarted=self.restarted
            )

    def state(self) -> dict[str, Any]:
        with self._lock:
            accounts = self.now()
            return {
                "next": self.next,
                "in_flight": sorted([*self.open, *(opened.position for opened, _ in self.handed), *self.again]),
                "in_flight_rollouts": accounts.in_flight,
                "trained": accounts.trained,
                "masked": dict(accounts.masked),
                "restarted": accounts.restarted,
                "replaced": self.replaced,
            }


class GroupStream:
    """The groups of ``requests(0)``, ``requests(1)`` and so on as they finish, until a request is None.

    The same position must always give the same request, also after a restart. ``batch_groups`` groups are trained at once and
    make one weight version, ``max_staleness`` versions may lie between a rollout's start and its training. ``weight_version`` is
    the one in place now; ``state`` what an earlier stream's `state()` gave. Rollouts are recorded when they are handed out, as of
    the step that trains them. Nothing starts before the first batch is asked for.

    Use `take_async` for batches, and call `published` when new weights are in place. `take` and ``with`` are the same for
    synchronous trainers. Leaving the block stops what runs. ``waited_s`` are the seconds spent waiting in `take`.
    Raises: ConfigError on bad arguments.
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
        if batch_groups < 1:
            raise ConfigError(f"batch_groups must be at least 1, got {batch_groups}")
        if max_staleness < 0:
            raise ConfigError(f"max_staleness cannot be negative, got {max_staleness}")
        if replace_up_to < 1:
            raise ConfigError(f"replace_up_to is a factor of at least 1, got {replace_up_to:g}")
        config = config or CollectConfig()
        self._may_replace = int((replace_up_to - 1) * batch_groups)
        self.batch_groups, self.max_staleness, self.weight_version = batch_groups, max_staleness, weight_version
        self.waited_s = 0.0
        self._requests, self._on_rollout, self._recording = requests, on_rollout, recording
        self._config = replace(config, max_staleness=None)  # age is looked at when a group is handed out
        places = places or Places(config.max_concurrent)
        self._collect = partial(collect_async, client=client, gateway=gateway, config=self._config, places=places)
        self._groups = _Accounts(state or {})
        self._replaced_before = self._groups.replaced
        self._ended = False  # there is no further request
        self._closed = False
        self._failure: BaseException | None = None
        self._moved = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    # -- taking -------------------------------------------------------------------------------------------------------

    async def take_async(self) -> list[Group]:
        """The next batch, in the order of the data: `batch_groups` groups, fewer at the end of the data, then none.

        Raises: GatewayError and the like when a group's collection cannot go on; what `requests` raises.
        """
        self._loop = asyncio.get_running_loop()
        began_s = time.monotonic()
        try:
            while True:
                self._moved.clear()
                self._fill()
                if self._failure is not None:
                    raise self._failure
                batch = self._choose()
                if batch is not None:
                    return self._hand(batch)
                await self._moved.wait()
        finally:
            self.waited_s += time.monotonic() - began_s

    def take(self) -> list[Group]:
        """`take_async` for synchronous callers."""
        return run_sync(self.take_async())

    def published(self, weight_version: int) -> None:
        """The groups handed out are trained, and sampling goes on with this version of the weights."""
        self.weight_version = weight_version
        self._groups.all_trained()
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._move)

    # -- what is where ------------------------------------------------------------------------------------------------

    @property
    def accounts(self) -> StreamAccounts:
        return self._groups.now()

    @property
    def replaced(self) -> int:
        """The number of groups without spread that were replaced."""
        return self._groups.replaced

    def state(self) -> dict[str, Any]:
        """The state from which a later stream goes on after the last trained batch, as JSON values."""
        return self._groups.state()

    # -- starting -----------------------------------------------------------------------------------------------------

    def _move(self) -> None:
        self._fill()
        self._moved.set()

    def _fill(self) -> None:
        """Start groups as long as there is a place and a batch for them."""
        while not (self._closed or self._failure is not None or (self._ended and not self._groups.again)):
            if len(self._groups.open) + len(self._groups.handed) >= self.batch_groups * (self.max_staleness + 1):
                return
            if any(opened.queued for opened in self._groups.open.values()):
                return  # all places are taken: who waits already comes first
            try:
                self._start()
            except Exception as e:  # the data's or the caller's; it is raised where the next batch is taken
                self._failure = e

    def _start(self) -> None:
        position = self._groups.again[0] if self._groups.again else self._groups.next
        request = self._requests(position)
        if request is None:
            if self._groups.again:
                raise ConfigError(
                    f"the data ends before position {position}, which was in flight: is it the same data?"
                )
            self._ended = True
            return
        size = request.n + self._config.extra_rollouts
        opened = _Open(position=position, request=request, size=size, queued=size)
        self._groups.started(opened)
        opened.task = asyncio.create_task(self._run(opened), name=f"group-{position}")

    async def _run(self, opened: _Open) -> None:
        try:
            (group,) = await self._collect(
                [opened.request], on_rollout=self._on_rollout, on_queued=partial(self._queued, opened)
            )
        except asyncio.CancelledError:
            raise
        except Exception as e:  # a gateway that makes no sessions; raised where the next batch is taken
            self._failure = self._failure or e
        else:
            opened.queued = 0
            if opened.since is None:
                opened.since = self.weight_version
            if self._is_replaced(group):
                self._record(self._groups.without_spread(opened, group), group.request)
                self._ended = False
            else:
                opened.group = group
        self._move()

    def _is_replaced(self, group: Group) -> bool:
        """Return True if the group's rewards are all equal and the next batch may still get other groups."""
        rewards = [reward for reward in group.rewards if reward is not None]
        return len(rewards) > 1 and nearly_equal(rewards) and self.replaced - self._replaced_before < self._may_replace

    def _queued(self, opened: _Open, queued: int) -> None:
        opened.queued = queued
        if opened.since is None:
            opened.since = self.weight_version
        if not queued:
            self._move()

    # -- handing out --------------------------------------------------------------------------------------------------

    def _choose(self) -> list[_Open] | None:
        """The groups of the next batch; None while it has to wait."""
        if self._ended and not self._groups.again and len(self._groups.open) <= self.batch_groups:
            every = list(self._groups.open.values())
            return every if all(opened.group is not None for opened in every) else None
        done = [opened for opened in self._groups.open.values() if opened.group is not None]
        if len(done) < self.batch_groups:
            return None
        chosen = sorted(done, key=lambda opened: (self._due(opened), opened.position))[: self.batch_groups]
        left = [self._due(opened) for opened in self._groups.open.values() if opened not in chosen]
        for later in range(self.max_staleness + 1):
            if sum(due <= self.weight_version + later for due in left) > later * self.batch_groups:
                return None
        return chosen

    def _due(self, opened: _Open) -> float:
        """The last version from which a group may be trained."""
        return math.inf if opened.since is None else opened.since + self.max_staleness

    def _hand(self, chosen: Sequence[_Open]) -> list[Group]:
        version = self.weight_version
        batch = []
        for opened in sorted(chosen, key=lambda opened: opened.position):
            assert opened.group is not None
            group = replace(opened.group, rollouts=[self._aged(r, version) for r in opened.group.rollouts])
            batch.append(group)
            self._groups.handed_out(opened, group)
            self._record(group.rollouts, group.request)
        self._replaced_before = self.replaced
        self._fill()
        return batch

    def _record(self, rollouts: Sequence[CollectedRollout], request: GroupRequest) -> None:
        if self._recording is not None:
            where = self._recording.at(self._recording.phase, self.weight_version)
            for rollout in rollouts:
                where.add(rollout, request, self.weight_version)

    def _aged(self, rollout: CollectedRollout, version: int) -> CollectedRollout:
        """Masked where the engine says that it sampled from older weights than were thought to be in place."""
        oldest = rollout.weight_version_min
        if rollout.usable and oldest is not None and oldest < version - self.max_staleness:
            return replace(rollout, mask_reason="stale")
        return rollout

    # -- ending -------------------------------------------------------------------------------------------------------

    async def close_async(self) -> None:
        """Stop what runs and delete its sessions. `state` still tells what was in flight."""
        self._closed = True
        tasks = [opened.task for opened in self._groups.open.values() if opened.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def close(self) -> None:
        """`close_async` for synchronous callers."""
        run_sync(self.close_async())

    async def __aenter__(self) -> GroupStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, e: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close_async()

    def __enter__(self) -> GroupStream:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, at: TracebackType | None) -> None:
        self.close()


collect_stream = GroupStream
