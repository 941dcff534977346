"""Publishing weights: pause, load, drop the caches, name the version, resume; then the proof that they have arrived.

The proof: the engine samples a few answers to a prompt, and the trainer computes the logprobs of the same tokens. These must be
equal. An engine that kept one old tensor, a packed copy of one, or a prefix computed with old weights, gives others. No status
tells that: engines answer 200 and keep the old weights. `weights.movement` proves updates that are smaller than the rounding.
"""

from __future__ import annotations

import logging
import math
import random
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from ..errors import ConfigError, WeightsError
from .checkpoint import write_checkpoint
from .checksums import check_sums
from .engines import Engine, EngineAddress, InFlight, Sampled
from .movement import UpdateProof, logprobs_of
from .sharded import is_sharded

log = logging.getLogger(__name__)

MAX_GAP = 1e-3  # float32 on both sides differs by 1e-5; weights of one optimizer step ago by 1e-2 and more
MAX_GAP_OF_BFLOAT16 = 1.0  # rounding: of a thousand tokens of SmolLM2, the largest gap was 0.3 and the mean 0.02
MEAN_GROWTH = 3.0  # limit of the mean gap as a multiple of the first publish's: rounding does not grow with training
LEAST_MEAN = {"float32": 1e-4, "bfloat16": 0.02}  # a mean gap that is never too large
PROBE_PROMPT_TOKENS = 64
PROBE_ANSWERS = 4
PROBE_ANSWER_TOKENS = 32
PROBE_TEMPERATURE = 0.5  # its logprobs differ from those of temperature 1 by much more than rounding
PAGE = "docs/engines.md#the-weights-did-not-arrive"


def publish(folder: Path, version: int, engines: Sequence[EngineAddress], *, in_flight: InFlight = "wait") -> int:
    """Let all engines sample from the checkpoint in this folder from now on, as this version. Returns the version they report.

    ``in_flight`` is what happens to running requests: "wait" lets them end first, "keep" continues them with the new weights,
    "abort" ends them. Raises: WeightsError, also if an engine reports another checksum than the folder's. The engines then resume
    with the weights that they have.
    """
    folder = folder.resolve()
    servers = [address.connect() for address in engines]

    def everywhere(work: Callable[[Engine], Any]) -> list[Any]:
        with ThreadPoolExecutor(max(1, len(servers))) as pool:
            return list(pool.map(work, servers))

    try:
        everywhere(lambda server: server.pause(in_flight))
        sums = everywhere(lambda server: server.load(folder, version))
    finally:
        everywhere(lambda server: server.resume())
    versions = set(everywhere(lambda server: server.version()))
    if versions != {version}:
        raise WeightsError(
            f"the weights did not arrive: version {version} was published, but the engines report {versions} ({PAGE})"
        )
    for address, server, found in zip(engines, servers, sums, strict=True):
        if found:
            check_sums(found, server.dtype() or "float32", folder, f"{address.engine} at {address.url}")
    return version


class Gap(NamedTuple):
    """Differences between an engine's logprobs and the trainer's of the same tokens. Units: nats."""

    largest: float
    mean: float

    @classmethod
    def of(cls, answers: Sequence[Sampled], computed: Sequence[Sequence[float]], prompt_tokens: int) -> Gap:
        """Compare answers with the trainer's logprobs of prompt and answer, of all tokens but the first.

        Raises: WeightsError when there is nothing to compare.
        """
        if not any(answer.ids for answer in answers) or any(len(a.ids) != len(a.logprobs) for a in answers):
            raise WeightsError(
                "the engine sampled nothing, or did not return one logprob per token: nothing can be compared"
            )
        found = [
            abs(recorded - own)
            for answer, logprobs in zip(answers, computed, strict=True)
            for recorded, own in zip(answer.logprobs, logprobs[prompt_tokens - 1 :], strict=True)
        ]
        return cls(max(found, key=lambda each: (math.isnan(each), each)), fmean(found))


def prove(
    model: Any,
    prompt_ids: Sequence[int],
    engines: Sequence[EngineAddress],
    version: int,
    *,
    max_gap: float | None = None,
    temperature: float = 1.0,
) -> Gap:
    """Compare what engines and trainer say of the same tokens. Returns the largest gap and the largest mean.

    Raises: WeightsError when the gap of a token is above ``max_gap``; None: what rounding allows in the engine's type of numbers.
    ConfigError when an engine reports the logprobs of another temperature than it samples at.
    """
    largest = Gap(0.0, 0.0)
    for address in engines:
        prompt, engine = list(prompt_ids), address.connect()
        how = {"n": PROBE_ANSWERS, "max_tokens": PROBE_ANSWER_TOKENS, "seed": version + 1}
        allowed = max_gap or (MAX_GAP_OF_BFLOAT16 if engine.dtype() == "bfloat16" else MAX_GAP)
        probed_at = 1.0 if temperature == 1.0 else PROBE_TEMPERATURE  # near to 1 rounding would hide a difference
        sampled = engine.sample(prompt, **how, temperature=probed_at)
        found, raw = gap(model, prompt, sampled, probed_at), gap(model, prompt, sampled).largest
        # A policy that is sure of each token shows no difference.
        if raw <= allowed and found.largest > max(MAX_GAP, 2 * raw):
            raise ConfigError(
                f"{address.engine} at {address.url} reports the logprobs of temperature 1, whatever it samples at, and "
                f"this run samples at {temperature:g}: {engine.scaled_by or 'sample at temperature 1'}"
            )
        check_gap(found.largest, version, f"{address.engine} at {address.url}", allowed)
        largest = Gap(max(largest.largest, found.largest), max(largest.mean, found.mean))
    return largest


def check_gap(found: float, version: int, where: str, max_gap: float) -> None:
    """Raise WeightsError if engine and trainer differ by more than ``max_gap``, or by NaN."""
    if not found <= max_gap:
        raise WeightsError(
            f"the weights did not arrive: after version {version} was published to {where}, its logprobs and the trainer's "
            f"differ by {found:.2g} (at most {max_gap:g}); the run stops, because it would train on tokens of other weights. "
            f"See {PAGE}"
        )


def gap(model: Any, prompt: list[int], sampled: Sequence[Sampled], temperature: float = 1.0) -> Gap:
    """Return the differences between an engine's logprobs and the model's at this temperature. Raises: WeightsError."""
    own = [logprobs_of(model, [*prompt, *answer.ids], temperature=temperature) for answer in sampled]
    return Gap.of(sampled, own, len(prompt))


def probe_prompt(vocabulary: int) -> list[int]:
    """Return token ids from all over a vocabulary, the same for each run."""
    return random.Random("probe").choices(range(vocabulary), k=PROBE_PROMPT_TOKENS)


class Publisher:
    """Publishes a trainer's weights to the engines of a run, each version in its own folder below ``folder``.

    ``announce`` is called with each version that has arrived (a gateway's `set_weight_version`). ``temperature`` is that of
    the run. ``proved`` is the newest version that all engines are proved to have, or None before a change large enough to prove.
    """

    def __init__(
        self,
        engines: Sequence[EngineAddress],
        folder: Path,
        *,
        announce: Callable[[int], Any] | None = None,
        in_flight: InFlight = "wait",
        max_gap: float | None = None,
        temperature: float = 1.0,
    ) -> None:
        self.engines = tuple(engines)
        self.folder = folder
        self.gap = 0.0  # the largest of the last version, as `prove` found it
        self._first_mean: float | None = None
        self._published: int | None = None
        self._proofs = [UpdateProof(address) for address in self.engines]
        self._announce = announce
        self._in_flight = in_flight
        self._max_gap = max_gap
        self._temperature = temperature

    def publish(self, model: Any, version: int, *, prompt_ids: Sequence[int] | None = None, main: bool = True) -> int:
        """Write, publish and prove. ``prompt_ids``: the probe's prompt, of the policy's own dialogues where there are any.

        Each process of a run whose model is split calls it, and only one with ``main``. Such a model cannot compute the proof
        in one process: the trainer compares the logprobs of its next batch. Raises: WeightsError.
        """
        folder = write_checkpoint(model, self.folder / f"{version:06d}", write=main)
        if not main:
            return version
        # A publish that fails may leave its version on some engines.
        published, self._published = self._published, None
        for address in self.engines if published is not None else ():
            if (found := address.connect().version()) != published:
                log.error(
                    "%s at %s reports version %s of its weights, although version %s was published: it was restarted. The turns "
                    "since then may be of its first weights",
                    *(address.engine, address.url, found, published),
                )
        publish(folder, version, self.engines, in_flight=self._in_flight)
        self._published = version
        if not is_sharded(model):
            self._prove(model, version, prompt_ids)
        for old in self.folder.iterdir():
            if old != folder:
                shutil.rmtree(old, ignore_errors=True)
        if self._announce is not None:
            self._announce(version)
        return version

    def _prove(self, model: Any, version: int, prompt_ids: Sequence[int] | None) -> None:
        prompt = list(prompt_ids or probe_prompt(model.config.vocab_size))[: PROBE_PROMPT_TOKENS * 4]
        found = prove(model, prompt, self.engines, version, max_gap=self._max_gap, temperature=self._temperature)
        self.gap = found.largest
        self._check_mean(found.mean, version)
        for proof in self._proofs:
            proof.check(model, prompt, version, own=prompt_ids is not None)

    @property
    def proved(self) -> int | None:
        versions = [proof.proved for proof in self._proofs]
        return None if None in versions or not versions else min(v for v in versions if v is not None)

    def _check_mean(self, mean: float, version: int) -> None:
        """Raise WeightsError if the mean gap is much larger than at the first publish."""
        if self._first_mean is None:
            self._first_mean = mean
            return
        dtypes = {"bfloat16" if address.connect().dtype() == "bfloat16" else "float32" for address in self.engines}
        allowed = max(MEAN_GROWTH * self._first_mean, *(LEAST_MEAN[dtype] for dtype in dtypes))
        if not mean <= allowed:
            raise WeightsError(
                f"the weights did not arrive: after version {version} was published, the logprobs of engine and trainer differ "
                f"by {mean:.2g} on average, and by {self._first_mean:.2g} after the first (at most {allowed:.2g}). See {PAGE}"
            )
