"""Writes the numbers of slime's trainer into the run's folder: logprobs and entropy of our samples.

With ``--save-debug-train-data`` slime gathers them from its ranks after every step and writes one file (format 2, slime 0.3.1).
`expect` writes next to it which rollouts the step's samples are; `take` joins both and removes them. slime numbers the
samples of a step as the rollout function returned them, forks flattened.
"""

from __future__ import annotations

import json
import logging
import pickle
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...runs import RunWriter
from ...weights import check_arrived
from ..collection.recording import Recording, gaps_of, of_sampled
from .convert import NOTE

log = logging.getLogger(__name__)

FOLDER = "trained"  # under the run's folder, empty between steps


def template(run: Path) -> str:
    return f"{run / FOLDER}/{{rollout_id}}.pt"


def expect(args: Any, recording: Recording, samples: Sequence[Any], step: int) -> None:
    """Store the rollouts of a step's samples next to the place where slime will write their numbers."""
    run = recording.run.folder
    if getattr(args, "save_debug_train_data", None) != template(run):
        return  # slime writes no file, or one of the user's choice
    notes = [None if sample.remove_sample else (sample.metadata or {}).get(NOTE) for sample in samples]
    rows = [note and [note["session_id"], note["branch"]] for note in notes]
    trusted = bool(getattr(args, "use_rollout_logprobs", False))
    try:
        (run / FOLDER).mkdir(parents=True, exist_ok=True)
        (run / FOLDER / f"{step}.json").write_text(json.dumps({"trusts_sampler": trusted, "samples": rows}))
    except OSError as e:  # training continues without its record
        log.warning("slime's numbers of step %s will not be kept: %s", step, e)
    # Left by the run that this run resumes: slime continues with the next step.
    (run / FOLDER / f"{step}.pt").unlink(missing_ok=True)


def take(recording: Recording, max_mean_gap: float | None = None) -> int:
    """Add slime's files to the run. Return the number of steps. An incomplete file waits for the next call.

    Raises: WeightsError if the recorded and slime's logprobs of a step differ by more than ``max_mean_gap`` on average.
    """
    steps = 0
    for listed in sorted((recording.run.folder / FOLDER).glob("*.json")):
        written = listed.with_suffix(".pt")
        if not written.exists() or (found := _loaded(written)) is None:
            continue
        gap = (0.0, 0)
        try:
            gap = _add(recording, json.loads(listed.read_text()), found)
        except Exception as e:  # training continues without its record
            log.warning("slime's numbers of step %s are not kept: %s: %s", listed.stem, type(e).__name__, e)
        written.unlink()
        listed.unlink()
        check_arrived(*gap, int(listed.stem), max_mean_gap)
        steps += 1
    return steps


def take_rest(run: Path) -> None:
    """Call `take` for the files that remain when slime has ended, from another process than its rollouts'."""
    folder = run / FOLDER
    if any(folder.glob("*.pt")):
        with Recording(run=RunWriter(run)) as recording:
            take(recording)  # the run has ended, so there is nothing to stop
    shutil.rmtree(folder, ignore_errors=True)


def _add(recording: Recording, listed: Mapping[str, Any], found: Mapping[str, Any]) -> tuple[float, int]:
    """Record a file's numbers. Return the sum of the logprobs' differences from slime's, and the number of tokens."""
    # Logprobs that slime did not compute before training come from the training pass, partly after updates.
    unknown = listed["trusts_sampler"] and any(len(shard["num_microbatches"]) > 1 for shard in found["dp_shards"])
    gap_sum, compared = 0.0, 0
    for sample in found["samples"]:
        if (row := listed["samples"][sample["rollout_position"]]) is None:
            continue
        mask = sample["loss_masks"].tolist()
        columns = {"logprobs": None if unknown else sample.get("log_probs"), "entropies": sample.get("entropy")}
        values = {name: column.tolist() for name, column in columns.items() if column is not None}
        prompt_tokens = len(sample["tokens"]) - len(mask)
        facts: dict[str, Any] = {name: of_sampled(given, mask, prompt_tokens) for name, given in values.items()}
        recording.trained(*row, updates=0, **facts)
        if "logprobs" in values and sample.get("rollout_log_probs") is not None:
            gaps = gaps_of(values["logprobs"], sample["rollout_log_probs"].tolist(), mask)
            gap_sum, compared = gap_sum + sum(gaps), compared + len(gaps)
    return gap_sum, compared


def _loaded(path: Path) -> Mapping[str, Any] | None:
    import torch

    try:
        found: Mapping[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, OSError, EOFError, pickle.UnpicklingError):  # slime is writing it
        return None
    return found
