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
import zlib
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...runs import RunWriter
from ...weights import check_arrived
from ..collection.recording import Recording, gaps_of, of_sampled
from .convert import NOTE

log = logging.getLogger(__name__)

FOLDER = "trained"  # under the run's folder, empty between steps
FORMAT = 2


def template(run: Path) -> str:
    """Return the value of ``--save-debug-train-data``. slime fills in the step."""
    return str(run / FOLDER).replace("{", "{{").replace("}", "}}") + "/{rollout_id}.pt"


def expect(args: Any, recording: Recording, samples: Sequence[Any], step: int) -> None:
    """Store the rollouts of a step's samples next to the place where slime will write their numbers."""
    run = recording.run.folder
    if getattr(args, "save_debug_train_data", None) != template(run):
        return  # slime writes no file, or one of the user's choice
    rows = [None if sample.remove_sample else _row(sample) for sample in samples]
    trusted = bool(getattr(args, "use_rollout_logprobs", False))
    listed = run / FOLDER / f"{step}.json"
    try:
        listed.parent.mkdir(parents=True, exist_ok=True)
        listed.write_text(json.dumps({"trusts_sampler": trusted, "samples": rows}))
    except OSError as e:  # training continues without its record
        log.warning("slime's numbers of step %s will not be kept: %s", step, e)
    (run / FOLDER / f"{step}.pt").unlink(
        missing_ok=True
    )  # left by the run that this run resumes: slime continues with the next step


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
        except (KeyError, ValueError, TypeError) as e:
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


def _row(sample: Any) -> dict[str, Any] | None:
    note = (sample.metadata or {}).get(NOTE) or {}
    if note.get("session_id") is None:
        return None
    return {"session": note["session_id"], "sequence": note["branch"], "tokens": _checksum(sample.tokens)}


def _add(recording: Recording, listed: Mapping[str, Any], found: Mapping[str, Any]) -> tuple[float, int]:
    """Record a file's numbers. Return the sum of the logprobs' differences from slime's, and the number of tokens."""
    if found.get("format_version") != FORMAT:
        raise ValueError(f"its file has format {found.get('format_version')}, not {FORMAT}")
    # Logprobs that slime did not compute before training come from the training pass, partly after updates.
    several = any(len(shard["num_microbatches"]) > 1 for shard in found["dp_shards"])
    unknown = listed["trusts_sampler"] and several
    gap_sum, compared = 0.0, 0
    for sample in found["samples"]:
        row = listed["samples"][sample["rollout_position"]]
        if row is None:
            continue
        tokens = sample["tokens"].tolist()
        if _checksum(tokens) != row["tokens"]:
            raise ValueError(f"sample {sample['rollout_position']} is not that of session {row['session']}")
        mask = sample["loss_masks"].tolist()
        facts: dict[str, Any] = {}
        for name, key in (("logprobs", "log_probs"), ("entropies", "entropy")):
            values = None if unknown and key == "log_probs" else _values(sample, key)
            if values is not None:
                facts[name] = of_sampled(values, mask, len(tokens) - len(mask))
        if facts:
            recording.trained(row["session"], row["sequence"], updates=0, **facts)
        own_T, recorded_T = None if unknown else _values(sample, "log_probs"), _values(sample, "rollout_log_probs")
        if own_T is not None and recorded_T is not None:
            gaps = gaps_of(own_T, recorded_T, mask)
            gap_sum, compared = gap_sum + sum(gaps), compared + len(gaps)
    return gap_sum, compared


def _values(sample: Mapping[str, Any], key: str) -> list[float] | None:
    return sample[key].tolist() if sample.get(key) is not None else None


def _checksum(tokens: Sequence[int]) -> int:
    return zlib.crc32(array("i", tokens).tobytes())


def _loaded(path: Path) -> Mapping[str, Any] | None:
    import torch

    try:
        found: Mapping[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        return {}  # not what slime 0.3.1 writes
    except (RuntimeError, OSError, EOFError):  # slime is writing it
        return None
    return found
