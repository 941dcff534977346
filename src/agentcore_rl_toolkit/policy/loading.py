"""A model's folder as a decoder: the fast decoder if it knows the model, otherwise transformers.

The memory that it needs is computed before anything is read.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from .._installation import require
from ..errors import ConfigError
from ..weights.folders import complete_folder
from .decoder import Decoder, DecoderShape, end_ids
from .model import check_directory, weight_files
from .transformers_decoder import TransformersDecoder

logger = logging.getLogger(__name__)

_FLOAT = 4  # bytes of a number in float32, in which a trainer keeps weights, gradients and moments
_SMALL = 10_000_000  # parameters below which a step is overhead, whatever the type of its numbers
_CACHE_SHARE = 4  # a quarter of the free memory holds the running sequences; a trainer may want the rest
_LEAST_CONTEXT = 1024  # tokens of a context that fits into memory; agents cannot work with fewer


def converted(file: Path) -> Path:
    """Return a folder with a GGUF file's model, in float32 and the layout of transformers.

    Raises: ConfigError when transformers cannot read the file, MissingExtraError without the packages that it needs for it.
    """
    file, state = file.resolve(), file.stat()
    digest = hashlib.sha256(f"{file}\0{state.st_size}\0{state.st_mtime_ns}".encode()).hexdigest()[:12]
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = base / "agentcore-rl" / "models" / f"{file.stem}-{digest}"
    if folder.is_dir():
        return folder
    for module in ("gguf", "accelerate"):
        require(module, extra="gguf")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    logger.warning("converting %s into %s, once", file.name, folder)
    partial = folder.with_name(f"{folder.name}.{os.getpid()}")
    try:
        model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    except (ValueError, KeyError, OSError, RuntimeError) as e:
        raise ConfigError(f"{file}: transformers cannot read this GGUF file: {str(e).splitlines()[0]}") from e
    if hasattr(model.config, "quantization_config"):  # the file is quantized, and the weights are plain numbers now
        del model.config.quantization_config
    model.hf_quantizer = None
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    complete_folder(partial)
    try:
        partial.rename(folder)
    except OSError:  # another process was faster
        shutil.rmtree(partial)
    return folder


def placement(parameters: int) -> tuple[str, torch.dtype]:
    """Return device and type of numbers for a model of this size: a GPU in bfloat16, or the CPU in float32.

    On a CPU float32 proves weights to 1e-3; bfloat16, 1.6 times as fast on some, rounds too much for that. Small models
    stay on the CPU.
    """
    if torch.cuda.is_available() and parameters >= _SMALL:
        return "cuda", torch.bfloat16
    return "cpu", torch.float32


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The memory that a model needs. Units: bytes, except ``parameters``. ``engine`` counts old and new weights."""

    family: str
    fast: bool
    parameters: int

    @property
    def text(self) -> str:
        millions = self.parameters / 1e6
        return f"{millions:,.{0 if millions >= 1 else 2}f} million parameters"

    @property
    def engine(self) -> int:
        device, dtype = placement(self.parameters)
        arriving = _FLOAT if device == "cpu" else 0  # they arrive in the CPU's memory first
        return (dtype.itemsize + arriving) * self.parameters

    def training(self, lora: bool) -> int:
        """Return the bytes of trainer and engine without activations. AdamW keeps weights, gradients and two moments.

        With LoRA, the trainer publishes a merged copy of the weights, which is in the CPU's memory.
        """
        on_cpu = placement(self.parameters)[0] == "cpu"
        return self.engine + ((1 + on_cpu) if lora else 4) * _FLOAT * self.parameters


def sizes_of(folder: Path) -> Sizes:
    """Read a model's configuration and the heads of its weight files. Raises: ConfigError."""
    from safetensors import safe_open

    config, parameters = _config(folder), 0
    for file in weight_files(folder):
        with safe_open(file, framework="pt") as tensors:
            parameters += sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118  (no mapping)
    return Sizes(family=config.model_type, fast=_shape(config) is not None, parameters=parameters)


def check_memory(needed: int, what: str) -> None:
    """Raise ConfigError if fewer than ``needed`` bytes are free."""
    free = free_memory()
    if free is not None and needed > free:
        raise ConfigError(
            f"{what} needs {gigabytes(needed)} of memory, and this machine has {gigabytes(free)} free: use a smaller model, or a "
            "larger machine"
        )


def free_memory() -> int | None:
    """Return the bytes that a process can still get: on the GPU, or of the machine and its control group.

    None if the limit is unknown.
    """
    if torch.cuda.is_available():
        return torch.cuda.mem_get_info()[0]
    found = []
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        found.append(int(lines["MemAvailable"].split()[0]) * 1024)
    except (OSError, KeyError, ValueError):
        if "SC_PHYS_PAGES" in os.sysconf_names:
            found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    try:
        group = Path("/sys/fs/cgroup")
        found.append(int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    except (OSError, ValueError):  # no control group, or "max"
        pass
    return min(found, default=None)


def gigabytes(size: float) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.0f} MB"


def load_decoder(
    directory: str | Path | None = None, *, rows: int = 64, dtype: torch.dtype | None = None
) -> Decoder | TransformersDecoder:
    """Read a model's folder; None stands for the shipped policy, and for the type of numbers that `placement` says.

    Raises: ConfigError, PolicyError.
    """
    folder = check_directory(directory)
    config, sizes = _config(folder), sizes_of(folder)
    device, best = placement(sizes.parameters)
    dtype = dtype or best
    check_memory(sizes.engine, f"a model of {sizes.text} ({folder.name})")
    shape = _shape(config)
    if shape is None:
        from transformers import AutoModelForCausalLM

        logger.warning("%s: transformers runs this model (%s) one sequence at a time", folder.name, sizes.family)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
        slow = TransformersDecoder(model.to(device), rows=rows)
        slow.shape = replace(slow.shape, end_ids=_ends(folder) or slow.shape.end_ids)
        return slow
    token_bytes, context = cache_numbers(shape) * dtype.itemsize, shape.context
    check_memory(sizes.engine + min(context, _LEAST_CONTEXT) * token_bytes, f"{folder.name} with its cache")
    free, room = free_memory(), None
    if free is not None:
        left = (free - sizes.engine) // token_bytes  # tokens
        if left < context:
            logger.warning("%s: memory for %d tokens of its context of %d is free", folder.name, left, context)
            shape = replace(shape, context=left)
        room = max(shape.context, left // _CACHE_SHARE)
    shape = replace(shape, end_ids=_ends(folder) or shape.end_ids)
    return Decoder(shape, read_state(folder), rows=rows, cache_tokens=room, device=device, dtype=dtype)


def cache_numbers(shape: DecoderShape) -> int:
    """Return how many numbers a token takes in the cache."""
    return 2 * shape.layers * shape.kv_heads * shape.head_size


def read_state(folder: Path) -> dict[str, torch.Tensor]:
    """Read the weights of a folder, which may be in several files."""
    from safetensors.torch import load_file

    return {name: tensor for file in weight_files(folder) for name, tensor in load_file(file).items()}


def _config(folder: Path) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except (ValueError, KeyError, OSError) as e:
        raise ConfigError(f"{folder}: transformers does not know this model: {str(e).splitlines()[0]}") from e


def _shape(config: Any) -> DecoderShape | None:
    try:
        return DecoderShape.from_config(config)
    except ConfigError:
        return None


def _ends(folder: Path) -> frozenset[int]:
    """Return the tokens that end a completion by `generation_config.json`, often more than those in `config.json`."""
    file = folder / "generation_config.json"
    return end_ids(json.loads(file.read_text()).get("eos_token_id")) if file.is_file() else frozenset()
