"""The built-in policy, and any other model in the layout of transformers: as a folder, and as objects of transformers.

The built-in one is an ordinary Qwen3 of 0.3 million parameters, which every engine for Qwen3 can load.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from ..errors import ConfigError
from ..weights.folders import complete_folder

WEIGHTS_DIR = Path(__file__).parent / "weights"
WEIGHTS_FILE = "model.safetensors"
TOKENIZER_FILE = "tokenizer.json"


def load_policy(directory: str | Path | None = None) -> tuple[Any, Any]:
    """Load ``(model, tokenizer)`` as transformers objects, fp32, in evaluation mode, for a trainer.

    Without a directory: the warm-started policy that ships with the package.
    Raises: ConfigError when the directory does not hold a policy.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = check_directory(directory)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return model.eval(), tokenizer


def check_directory(directory: str | Path | None) -> Path:
    """Return the directory's path (default: the shipped policy). Raises: ConfigError if it does not hold a policy."""
    folder = WEIGHTS_DIR if directory is None else Path(directory)
    missing = [name for name in ("config.json", TOKENIZER_FILE) if not (folder / name).is_file()]
    missing += [file.name for file in weight_files(folder) if not file.is_file()]
    if missing:
        raise ConfigError(f"{folder} does not contain a model: {', '.join(missing)} not found")
    return folder


def weight_files(folder: Path) -> list[Path]:
    """Return the files with the weights: one file, or those in an index."""
    index = folder / f"{WEIGHTS_FILE}.index.json"
    if (folder / WEIGHTS_FILE).is_file() or not index.is_file():
        return [folder / WEIGHTS_FILE]
    return [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]


def save_policy(model: Any, directory: str | Path, *, tokenizer_from: str | Path | None = None) -> Path:
    """Write model and tokenizer so that `load_policy`, transformers 4 and 5, vLLM and SGLang can load the directory.

    The tokenizer is that of ``tokenizer_from``, by default the shipped one.
    """
    from transformers import AutoTokenizer

    folder = Path(directory)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_from or WEIGHTS_DIR, local_files_only=True)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    complete_folder(folder)
    return folder
