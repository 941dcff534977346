"""GEPA's search over rollouts.

The reflection model sees rollouts of one half of the rows; texts are compared on the other half. A proposed text first runs on
the rows whose failures led to it. If it is better than its parent on these, it runs on all of the other half.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ..._installation import require
from ...client import BatchItem
from ...client.evaluation import EvalRow
from .reflection import Reflection
from .settings import SearchSettings

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Scored:
    """A rollout as the search sees it. ``shown`` is for the reflection model, by headings.

    ``score`` is None if it does not depend on the text: the infrastructure failed, or the agent gave no reward.
    """

    item: BatchItem
    score: float | None
    shown: Mapping[str, str]


# Runs rows with texts: one result per row, in order, of which one has a score at least.
Run = Callable[[Sequence[EvalRow], Mapping[str, str]], list[Scored]]


def search(
    texts: Mapping[str, str],
    learned: Sequence[EvalRow],
    compared: Sequence[EvalRow],
    run: Run,
    reflection: Reflection,
    *,
    stop: Callable[[], bool],
    settings: SearchSettings,
    folder: Path,
) -> list[dict[str, Any]]:
    """Search for better texts, and return all that ran on every row of ``compared``, beginning with the given ones.

    Each has ``texts``, ``mean`` and ``parent``, a place in this list. ``stop`` is asked before each proposal. A search
    that ended early continues from ``folder``. Raises: what ``run`` and ``reflection`` raise.
    """
    gepa = require("gepa", extra="optimize")
    folder.mkdir(parents=True, exist_ok=True)
    found = gepa.optimize(
        seed_candidate=dict(texts),
        trainset=list(learned),
        valset=list(compared),
        adapter=_Adapter(run, gepa.EvaluationBatch, resumed=(folder / "gepa_state.bin").exists()),
        reflection_lm=reflection,
        reflection_minibatch_size=settings.batch,
        perfect_score=settings.perfect,
        stop_callbacks=[
            gepa.ScoreThresholdStopper(settings.perfect),
            lambda _: reflection.error is not None or stop(),
        ],
        run_dir=str(folder),
        seed=settings.seed,
        logger=SimpleNamespace(log=log.info),
        track_best_outputs=False,
    )
    if reflection.error is not None:
        raise reflection.error
    each = zip(found.candidates, found.val_aggregate_scores, found.parents, strict=True)
    return [{"texts": texts, "mean": mean, "parent": parents[0]} for texts, mean, parents in each]


class _Adapter:
    """Evaluations and feedback for GEPA."""

    propose_new_texts = None  # GEPA's own prompt asks the reflection model

    def __init__(self, run: Run, batch: Callable[..., Any], *, resumed: bool) -> None:
        self._run, self._batch, self._resumed = run, batch, resumed

    def evaluate(self, batch: Sequence[EvalRow], candidate: dict[str, str], capture_traces: bool = False) -> Any:
        """Run the rows. A row without a score gets the mean of the others, and so does not change the mean."""
        if self._resumed:  # GEPA asks for the first texts' scores before it reads them from its state
            self._resumed = False
            return self._batch(outputs=[""] * len(batch), scores=[0.0] * len(batch))
        results = self._run(batch, candidate)
        mean = statistics.fmean(r.score for r in results if r.score is not None)
        scores = [mean if r.score is None else r.score for r in results]
        return self._batch(outputs=[r.item.session_id for r in results], scores=scores, trajectories=results)

    def make_reflective_dataset(
        self, candidate: dict[str, str], eval_batch: Any, components_to_update: list[str]
    ) -> dict[str, list[Mapping[str, str]]]:
        shown = [r.shown for r in eval_batch.trajectories if r.score is not None]
        return dict.fromkeys(components_to_update, shown)
