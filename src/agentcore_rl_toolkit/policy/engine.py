"""The thread that computes: requests queue up, join the running batch between steps, and leave when done.

Only this thread touches the model. Other threads give it requests (`submit`), cancellations (`cancel`) and new weights
(`update_weights`), and get results through listeners, which are called together once a step.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from ..errors import PolicyError
from ..weights.checksums import checksum
from .batch import Batch, Generation
from .decoder import Decoder
from .loading import load_decoder
from .model import TOKENIZER_FILE, check_directory
from .sampling import SamplingParams
from .transformers_decoder import TransformersDecoder

logger = logging.getLogger(__name__)

_PROMPT_TOKENS_PER_STEP = 8192  # bounds how long running sequences wait for others' prompts: about 0.1 s

_Order = tuple[dict[str, torch.Tensor], int | None, "Future[int]"]


class Engine:
    """A running policy: token ids in, token ids and logprobs out, weights in. Use as a context manager, or `start` and `close`.

    Listeners are called on the engine's thread. ``tokenizer`` is needed for stop strings alone.
    """

    def __init__(
        self,
        decoder: Decoder | TransformersDecoder,
        tokenizer: Tokenizer | None = None,
        *,
        version: int = 0,
        seed: int | None = None,
    ) -> None:
        self.context = decoder.shape.context
        self.vocabulary = decoder.shape.vocabulary
        self.dtype = str(decoder.dtype).removeprefix("torch.")
        self.checksums: dict[str, int] = {}  # checksums of some tensors of the newest weights
        self._decoder = decoder
        self._batch = Batch(decoder, tokenizer, version=version, seed=seed)
        self._waiting: deque[Generation] = deque()
        self._orders: deque[_Order] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="policy-engine", daemon=True)

    @classmethod
    def from_directory(
        cls, directory: str | Path | None = None, *, max_batch: int = 64, dtype: str | None = None, **options: Any
    ) -> Engine:
        """Make an engine of a policy directory (default: the shipped policy). ``dtype`` is by default `placement`'s.

        Raises: ConfigError, PolicyError.
        """
        folder = check_directory(directory)
        tokenizer = Tokenizer.from_file(str(folder / TOKENIZER_FILE))
        wanted = None if dtype is None else getattr(torch, dtype)
        return cls(load_decoder(folder, rows=max_batch, dtype=wanted), tokenizer, **options)

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
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._closing

    @property
    def idle(self) -> bool:
        """Return True if nothing runs or waits."""
        return not self._batch.running and not self._waiting

    def submit(self, generations: Sequence[Generation]) -> None:
        """Queue completions, all or none. Raises: PolicyError when one cannot be sampled, or the engine is closed."""
        for generation in generations:
            self._check(generation)
        with self._wake:
            if self._closing:
                raise PolicyError("the policy server is shutting down")
            self._waiting.extend(generations)
            self._wake.notify()

    def text(self, token: int) -> str | None:
        """Return the text of a token, or None without a tokenizer."""
        tokenizer = self._batch.tokenizer
        return tokenizer.decode([token], skip_special_tokens=False) if tokenizer is not None else None

    def cancel(self, generation: Generation) -> None:
        """Ask for a completion to end before its next token."""
        generation.cancelled = True

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
        future: Future[int] = Future()
        with self._wake:
            if self._closing:
                future.set_exception(PolicyError("the policy server is shutting down"))
            else:
                self._orders.append((state, version, future))
                self._wake.notify()
        return future

    def _check(self, generation: Generation) -> None:
        ids, params = generation.prompt_ids, generation.params
        if not ids or min(ids) < 0 or max(ids) >= self.vocabulary:
            raise PolicyError(f"a prompt is a list of token ids, each from 0 to {self.vocabulary - 1}, and not empty")
        if len(ids) >= self.context:  # a prompt that fills the context leaves no room for a token
            raise PolicyError(f"the model's maximum context length is {self.context} tokens, the prompt has {len(ids)}")
        if params.stop and self._batch.tokenizer is None:
            raise PolicyError("this engine has no tokenizer, which stop strings need")

    def _run(self) -> None:
        try:
            while self._next():
                pass
        except Exception:
            logger.exception("the engine's thread has failed; /health reports this")
        finally:
            self._end_everything()

    def _next(self) -> bool:
        """Wait for work and do one piece of it. False: the engine is to end."""
        with self._wake:
            self._wake.wait_for(lambda: self._closing or self._orders or not self.idle)
            if self._closing:
                return False
            orders, self._orders = self._orders, deque()
        for state, version, future in orders:
            self._load(state, version, future)
        _notify(self._step())
        return True

    def _load(self, state: dict[str, torch.Tensor], version: int | None, future: Future[int]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        new = self._batch.version + 1 if version is None else version
        try:
            self._batch.load(state, new)
            self.checksums = {n: checksum(t, self.dtype) for n, t in self._decoder.plain_tensors().items()}
        except Exception as e:  # the caller's tensors may be of any kind
            future.set_exception(e)
        else:
            future.set_result(new)

    def _admit(self) -> list[Generation]:
        """Let waiting completions join the batch; returns those that were cancelled while they waited."""
        tokens, gone = 0, []
        while self._waiting and self._batch.has_room(self._waiting[0]) and tokens < _PROMPT_TOKENS_PER_STEP:
            with self._wake:
                generation = self._waiting.popleft()
            if generation.cancelled:
                generation.finish_reason = "cancelled"
                gone.append(generation)
                continue
            self._batch.add(generation)
            tokens += len(generation.prompt_ids) - generation.cached_tokens
        return gone

    def _step(self) -> list[Generation]:
        news: list[Generation] = []
        try:
            news += self._admit()
            if self._batch.running:
                news += self._batch.step()
        except Exception as e:
            # Without this the thread would die and every later request would wait forever.
            logger.exception("a decoding step failed; its requests end with an error")
            return news + self._batch.fail_all(f"{type(e).__name__}: {e}")
        for g in self._batch.running:
            if g.notify_every and (len(g.token_ids) == 1 or len(g.token_ids) % g.notify_every == 0):
                news.append(g)
        return news

    def _end_everything(self) -> None:
        with self._wake:
            self._closing = True
            left = [*self._batch.running, *self._waiting]
            self._waiting.clear()
            orders, self._orders = self._orders, deque()
        for generation in left:
            generation.finish_reason = "cancelled"
        for _, _, future in orders:
            future.set_exception(PolicyError("the policy server is shutting down"))
        _notify(left)


def _notify(news: Sequence[Generation]) -> None:
    for generation in news:
        if generation.listener is not None:
            generation.listener(generation)
