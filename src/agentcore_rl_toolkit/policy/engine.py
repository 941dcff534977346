"""The thread that computes: requests queue up, join the running batch between steps, and leave when done.

Everything that touches the model happens on this one thread. Other threads hand it work (`submit`), wishes (`cancel`) and new
weights (`update_weights`), and hear back through listeners, which are called in one go per step.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch

from ..errors import PolicyError
from .batch import Batch, Generation
from .decoder import Decoder
from .model import check_directory
from .sampling import SamplingParams
from .tokens import ChatTokenizer

logger = logging.getLogger(__name__)

_PROMPT_TOKENS_PER_STEP = 8192  # bounds how long running sequences wait for others' prompts: about 0.1 s
_EXPIRE_EVERY_S = 0.05

Dispatcher = Callable[[list[Generation]], None]


class QueueFullError(PolicyError):
    """More requests are waiting than allowed; try again after ``retry_after_s``."""

    def __init__(self, message: str = "", *, retry_after_s: float = 1.0, **ids: Any) -> None:
        super().__init__(message, **ids)
        self.retry_after_s = retry_after_s


class Engine:
    """A running policy. Use as a context manager, or `start` and `close`.

    ``dispatch`` receives all generations of a step that have news; by default their listeners are called on the engine's thread.
    """

    def __init__(
        self,
        decoder: Decoder,
        tokenizer: ChatTokenizer,
        *,
        version: int = 0,
        seed: int | None = None,
        max_queue: int = 1024,
        dispatch: Dispatcher | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.context = decoder.shape.context
        self.max_queue = max_queue
        self.dispatch: Dispatcher = dispatch or _call_listeners
        self.busy_s = 0.0
        self._batch = Batch(decoder, tokenizer, version=version, seed=seed)
        self._waiting: deque[Generation] = deque()
        self._orders: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._wake = threading.Condition()
        self._paused = False
        self._closing = False
        self._next_expiry = 0.0
        self._thread = threading.Thread(target=self._run, name="policy-engine", daemon=True)

    @classmethod
    def from_directory(cls, directory: str | Path | None = None, *, max_batch: int = 64, **options: Any) -> Engine:
        """An engine on a policy directory; None stands for the shipped policy. Raises: ConfigError, PolicyError."""
        folder = check_directory(directory)
        return cls(Decoder.from_directory(folder, rows=max_batch), ChatTokenizer.from_directory(folder), **options)

    def start(self) -> Engine:
        self._thread.start()
        return self

    def close(self, timeout_s: float = 10.0) -> None:
        """End the thread; whatever runs or waits ends as cancelled. Raises: PolicyError if it does not stop in time."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                raise PolicyError(f"the engine's thread did not stop within {timeout_s} s")

    def __enter__(self) -> Engine:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def weight_version(self) -> int:
        return self._batch.version

    @property
    def paused(self) -> bool:
        return self._paused

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def submit(self, generations: Sequence[Generation]) -> None:
        """Queue completions, all or none. Raises: QueueFullError, PolicyError when the engine is closed."""
        with self._wake:
            if self._closing:
                raise PolicyError("the policy server is shutting down")
            if len(self._waiting) + len(generations) > self.max_queue:
                raise QueueFullError(f"{len(self._waiting)} requests are waiting, the limit is {self.max_queue}")
            self._waiting.extend(generations)
            self._wake.notify()

    def cancel(self, generation: Generation) -> None:
        """Ask for a completion to end before its next token."""
        generation.cancelled = True
        with self._wake:
            self._next_expiry = 0.0
            self._wake.notify()

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, *, timeout_s: float | None = 120.0
    ) -> list[Generation]:
        """Complete prompts and wait for all of them. Raises: PolicyError after ``timeout_s`` (None: no limit)."""
        left = threading.Semaphore(0)
        generations = [
            Generation(prompt_ids=list(prompt), params=params, listener=lambda _: left.release()) for prompt in prompts
        ]
        self.submit(generations)
        until = None if timeout_s is None else time.monotonic() + timeout_s
        for _ in generations:
            if not left.acquire(timeout=None if until is None else max(0.0, until - time.monotonic())):
                for generation in generations:
                    self.cancel(generation)
                raise PolicyError(f"no completion within {timeout_s} s")
        return generations

    def update_weights(self, state: dict[str, torch.Tensor], version: int | None = None) -> Future[int]:
        """Replace all weights between two steps; the future gives the new version (None: one more than before).

        Its exception is a PolicyError when the tensors do not fit; the old weights then stay.
        """

        def apply() -> int:
            new = self._batch.version + 1 if version is None else version
            self._batch.load(state, new)
            return new

        return self._order(apply)

    def pause(self) -> Future[None]:
        """Stop between two steps; done when no more tokens are made. Running completions keep their place, new ones queue."""
        return self._order(lambda: self._set_paused(True))

    def resume(self) -> Future[None]:
        return self._order(lambda: self._set_paused(False))

    def stats(self) -> dict[str, float]:
        """Numbers for /metrics and /health."""
        counters, prefixes = self._batch.counters, self._batch.prefixes
        return {
            "running": len(self._batch.running),
            "waiting": len(self._waiting),
            "prompts": counters.prompts,
            "prompt_tokens": counters.prompt_tokens,
            "cached_prompt_tokens": prefixes.hit_tokens,
            "generated_tokens": counters.generated_tokens,
            "steps": counters.steps,
            "busy_s": self.busy_s,
            **{f"finished_{reason}": count for reason, count in list(counters.finished.items())},
        }

    def _set_paused(self, paused: bool) -> None:
        self._paused = paused

    def _order(self, action: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        with self._wake:
            if self._closing:
                future.set_exception(PolicyError("the policy server is shutting down"))
            else:
                self._orders.append((action, future))
                self._wake.notify()
        return future

    def _run(self) -> None:
        try:
            self._work()
        except Exception:
            logger.exception("the engine's thread has failed; /health says so")
        finally:
            self._end_everything()

    def _work(self) -> None:
        while True:
            with self._wake:
                while not self._has_work():
                    # queued requests have deadlines, which nobody else checks
                    self._wake.wait(_EXPIRE_EVERY_S if self._waiting or self._batch.running else None)
                    if self._waiting or self._batch.running:
                        break
                if self._closing:
                    return
                orders = list(self._orders)
                self._orders.clear()
            for action, future in orders:
                _carry_out(action, future)
            news = self._expire()
            if not self._paused:
                news += self._step()
            if news:
                self.dispatch(news)

    def _has_work(self) -> bool:
        if self._closing or self._orders:
            return True
        return not self._paused and bool(self._waiting or self._batch.running)

    def _expire(self) -> list[Generation]:
        """End queued (and, while paused, running) completions that were cancelled or are past their deadline."""
        now = time.monotonic()
        if now < self._next_expiry:
            return []
        self._next_expiry = now + _EXPIRE_EVERY_S
        gone: list[Generation] = []
        with self._wake:
            for generation in self._waiting:
                if generation.cancelled:
                    generation.finish("cancelled")
                elif generation.deadline is not None and now > generation.deadline:
                    generation.finish("timeout")
            if any(g.finish_reason is not None for g in self._waiting):
                gone = [g for g in self._waiting if g.finish_reason is not None]
                self._waiting = deque(g for g in self._waiting if g.finish_reason is None)
        return gone + (self._batch.drop_stopped() if self._paused else [])

    def _admit(self) -> None:
        tokens = 0
        while self._waiting and self._batch.free_rows and tokens < _PROMPT_TOKENS_PER_STEP:
            with self._wake:
                generation = self._waiting.popleft()
            self._batch.add(generation)
            tokens += len(generation.prompt_ids) - generation.cached_tokens

    def _step(self) -> list[Generation]:
        started = time.monotonic()
        try:
            self._admit()
            news = self._batch.step() if self._batch.running else []
        except Exception as e:
            # Without this the thread would die and every later request would wait for its deadline.
            logger.exception("a decoding step failed; its requests end with an error")
            return self._batch.fail_all(f"{type(e).__name__}: {e}")
        self.busy_s += time.monotonic() - started
        for g in self._batch.running:
            if g.notify_every and (len(g.token_ids) == 1 or len(g.token_ids) % g.notify_every == 0):
                news.append(g)
        return news

    def _end_everything(self) -> None:
        with self._wake:
            self._closing = True
            left = [*self._batch.running, *self._waiting]
            self._waiting.clear()
            orders = list(self._orders)
            self._orders.clear()
        for generation in left:
            generation.finish("cancelled")
        for _, future in orders:
            future.set_exception(PolicyError("the policy server is shutting down"))
        if left:
            self.dispatch(left)


def _carry_out(action: Callable[[], Any], future: Future[Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = action()
    except Exception as e:  # belongs to whoever gave the order
        future.set_exception(e)
    else:
        future.set_result(result)


def _call_listeners(news: list[Generation]) -> None:
    for generation in news:
        if generation.listener is not None:
            generation.listener(generation)
