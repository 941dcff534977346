"""A GGUF file as a model's folder: converted once, and kept in the user's cache."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from pathlib import Path

from .._installation import require
from ..errors import ConfigError

logger = logging.getLogger(__name__)


def converted(file: Path) -> Path:
    """The folder of a GGUF file's model, in float32 and the layout of transformers.

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
    if hasattr(model.config, "quantization_config"):  # of the file; the weights are plain numbers now
        del model.config.quantization_config
    model.hf_quantizer = None
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    try:
        partial.rename(folder)
    except OSError:  # another process was faster
        shutil.rmtree(partial)
    return folder
