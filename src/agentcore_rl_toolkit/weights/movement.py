"""The proof that an engine's weights move with the trainer's.

A bound on the gap between engine and trainer does not show an engine that ignores small updates: in bfloat16 rounding makes a
larger gap than many steps do. So the proof looks at changes. For tokens of fixed sequences, let x be the change of the trainer's
logprob since some earlier version, and y the change of the engine's. The slope of y on x is 1 if the engine has the new weights,
and 0 if it has the old ones. The constant difference between the two programs cancels out.

    slope = sum(x y) / sum(x^2)        error = rms(y - slope x) / sqrt(sum(x^2))

As long as the change is too small to tell, nothing is proved, and the change grows from step to step.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import WeightsError
from .engines import EngineAddress

SEQUENCES = {"float32": (4, 32), "bfloat16": (16, 64)}  # answers, and tokens of each: rounding needs more of them
# The least rms of (y - slope x) that is believed: engines compute the same tokens a little differently from call to call.
NOISE = {"float32": 1e-5, "bfloat16": 1e-2}
ERRORS = 3.0  # standard errors that a slope must be away from the middle between 0 and 1


@dataclass(frozen=True, kw_only=True)
class Movement:
    """An engine's change against the trainer's: the slope with its standard error, and the ratio of their sizes (rms)."""

    slope: float
    error: float
    size: float

    @property
    def arrived(self) -> bool | None:
        """True for new weights, False for old ones, None if the change is too small to tell.

        Rounding moves the logprobs of an engine with new weights at least as much as the change itself, in ways that tokens share
        and the standard error does not show. So only an engine that hardly moved at all has old weights.
        """
        if self.slope - ERRORS * self.error > 0.5:
            return True
        return False if self.size < 0.5 and self.slope + ERRORS * self.error < 0.5 else None

    @classmethod
    def of(cls, trainer: Sequence[float], engine: Sequence[float], noise: float) -> Movement:
        """Compute the movement from both changes. Shapes: (N,) both."""
        square = math.fsum(x * x for x in trainer)
        if not square:
            return cls(slope=0.0, error=math.inf, size=math.inf)
        slope = math.fsum(x * y for x, y in zip(trainer, engine, strict=True)) / square
        left = math.fsum((y - slope * x) ** 2 for x, y in zip(trainer, engine, strict=True)) / len(trainer)
        size = math.sqrt(math.fsum(y * y for y in engine) / square)
        return cls(slope=slope, error=max(noise, math.sqrt(left)) / math.sqrt(square), size=size)


class UpdateProof:
    """Follows one engine from version to version. ``proved`` is the newest version that it was shown to have; None before."""

    def __init__(self, address: EngineAddress) -> None:
        self.proved: int | None = None
        self._address = address
        self._prompt: list[int] = []
        self._sequences: list[list[int]] = []
        self._trainer: list[float] = []  # logprobs at the version that later ones are compared with
        self._engine: list[float] = []

    def check(self, model: Any, prompt: list[int], version: int, *, own: bool) -> bool | None:
        """Compare with the last version that was proved. Returns True if this one is, None if the change is too small to tell.

        ``own`` says that the prompt is of the policy's own dialogues, whose tokens training moves most. The first such prompt
        replaces an earlier one, and the comparison begins with it.
        Raises: WeightsError if the engine still has old weights.
        """
        engine = self._address.connect()
        dtype = "bfloat16" if engine.dtype() == "bfloat16" else "float32"
        found: bool | None = None
        if self._sequences:
            trainer, answers = self._logprobs(model)
            movement = Movement.of(
                [b - a for a, b in zip(self._trainer, trainer, strict=True)],
                [b - a for a, b in zip(self._engine, answers, strict=True)],
                NOISE[dtype],
            )
            found = movement.arrived
            if found is False:
                raise WeightsError(
                    f"the weights did not arrive: since the last version that did, the logprobs of {self._address.engine} at "
                    f"{self._address.url} changed by {movement.slope:.2f} of the trainer's change (standard error "
                    f"{movement.error:.2f}), at version {version}. It samples from old weights"
                )
            if found:
                self.proved, self._trainer, self._engine = version, trainer, answers
        if not self._sequences or (own and not self._prompt):
            n, max_tokens = SEQUENCES[dtype]
            sampled = engine.sample(prompt, n=n, max_tokens=max_tokens, seed=version + 1)
            self._prompt = prompt if own else []
            self._sequences = [[*prompt, *answer.ids] for answer in sampled if answer.ids]
            self._start = len(prompt)
            self._trainer, self._engine = self._logprobs(model)
        return found

    def _logprobs(self, model: Any) -> tuple[list[float], list[float]]:
        """Return the trainer's and the engine's logprobs: of the prompt once, and of every answer."""
        engine = self._address.connect()
        trainer: list[float] = []
        answers: list[float] = []
        for number, ids in enumerate(self._sequences):
            first = 0 if number == 0 else self._start - 1
            trainer += logprobs_of(model, ids, exact=True)[first:]
            answers += engine.logprobs(ids)[first:]
        return trainer, answers


def logprobs_of(model: Any, ids: Sequence[int], *, temperature: float = 1.0, exact: bool = False) -> list[float]:
    """Return the logprob of each token but the first. With ``exact``, compute without autocast. Shapes: (T,) -> (T - 1,)."""
    import torch

    ids_1T = torch.tensor([list(ids)], device=next(model.parameters()).device)
    with torch.inference_mode(), _evaluating(model), _without_autocast(model) if exact else contextlib.nullcontext():
        logits_TV = model(input_ids=ids_1T, use_cache=False).logits[0, :-1].float() / temperature
        return list(torch.log_softmax(logits_TV, -1).gather(1, ids_1T[0, 1:, None])[:, 0].tolist())


@contextlib.contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    """Turn off dropout and the like while the block runs. Afterwards, each module is in its earlier mode."""
    modes = [(module, module.training) for module in model.modules()]  # only some layers may be in training mode
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextlib.contextmanager
def _without_autocast(model: Any) -> Iterator[None]:
    """Take away the `forward` that trainers put on a model and its layers to compute in a smaller type."""
    wrapped = [(module, module.__dict__.pop("forward")) for module in model.modules() if "forward" in module.__dict__]
    try:
        yield
    finally:
        for module, forward in wrapped:
            module.__dict__["forward"] = forward
