"""A model's folder that transformers 4, transformers 5, and engines with either version read alike.

transformers 5 writes `rope_parameters` and `dtype`. transformers 4 ignores both names without a message: it computes with a
rotary base of 10,000, whatever the model's is. It also refuses the tokenizer class `TokenizersBackend`. A folder with the names
of both versions is read correctly by both.

Sources: transformers 4.51.3 (`modeling_rope_utils.py`, `tokenization_utils_base.py`) and 5.24.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from ..errors import ConfigError

CONFIG_FILE = "config.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
DType = Literal["float32", "bfloat16", "float16"]


def complete_folder(folder: Path) -> None:
    """Add the names of transformers 4 to the configuration files, and put the chat template into both of its places."""
    _rewrite(folder / CONFIG_FILE, _both_versions)
    config, template = folder / TOKENIZER_CONFIG_FILE, folder / TEMPLATE_FILE
    if not config.is_file():
        return
    inline = json.loads(config.read_bytes()).get("chat_template")
    if template.is_file():
        inline = template.read_text(encoding="utf-8")
    elif isinstance(inline, str):  # several named templates, a list, have no file
        template.write_text(inline, encoding="utf-8")
    given = {} if inline is None else {"chat_template": inline}
    _rewrite(config, lambda values: _tokenizer_of_both_versions(values) | given)


def copy_folder(source: Path, target: Path, dtype: DType | None = None) -> Path:
    """Copy a model's folder with its weights as ``dtype`` (None: unchanged), complete it, all or nothing. Returns the target.

    The weights of a quantized model stay as they are.

    Raises: ConfigError if ``target`` exists, or if ``source`` has no weights in the safetensors format.
    """
    if target.exists():
        raise ConfigError(f"{target} exists. Remove it, or choose another folder")
    weights = sorted(source.glob("*.safetensors"))
    if not weights or not (source / CONFIG_FILE).is_file():
        raise ConfigError(f"{source} does not hold a model: config.json and *.safetensors are needed")
    if "quantization_config" in json.loads((source / CONFIG_FILE).read_bytes()):
        dtype = None  # its numbers have a meaning only in their own types
    partial = target.with_name(target.name + ".new")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for file in source.iterdir():
        if file.suffix != ".safetensors" and file.is_file():
            shutil.copy2(file, partial)
    size = sum(_copy_weights(file, partial / file.name, dtype) for file in weights)
    if dtype is not None:
        _rewrite(partial / CONFIG_FILE, lambda values: {**values, "dtype": dtype, "torch_dtype": dtype})
    for index in partial.glob("*.safetensors.index.json"):
        _rewrite(index, lambda values: {**values, "metadata": {**values.get("metadata", {}), "total_size": size}})
    complete_folder(partial)
    os.replace(partial, target)
    return target


def _copy_weights(source: Path, target: Path, dtype: DType | None) -> int:
    """Copy one file of weights, with its numbers as ``dtype``. Returns the bytes of its tensors."""
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(source)
    if dtype is not None:
        wanted = getattr(torch, dtype)
        tensors = {name: t.to(wanted) if t.is_floating_point() else t for name, t in tensors.items()}
    save_file(tensors, target, metadata={"format": "pt"})
    return sum(t.numel() * t.element_size() for t in tensors.values())


def _both_versions(config: dict[str, Any]) -> dict[str, Any]:
    """Return a model's configuration with the names of both versions, also in its parts (a text and a vision model)."""
    both = {key: _both_versions(value) if key.endswith("_config") and value else value for key, value in config.items()}
    if "dtype" in both:
        both.setdefault("torch_dtype", both["dtype"])
    rope = both.get("rope_parameters")
    if not isinstance(rope, dict):
        return both
    if "full_attention" in rope:  # a base for each kind of layer, as Gemma has them
        local = rope.get("sliding_attention") or {}
        if "rope_theta" in local:
            both.setdefault("rope_local_base_freq", local["rope_theta"])
        rope = rope["full_attention"]
    if "rope_theta" in rope:
        both.setdefault("rope_theta", rope["rope_theta"])
    if rope.get("rope_type", "default") != "default":
        scaling = {key: value for key, value in rope.items() if key not in ("rope_theta", "partial_rotary_factor")}
        both.setdefault("rope_scaling", scaling)
    if "partial_rotary_factor" in rope:
        both.setdefault("partial_rotary_factor", rope["partial_rotary_factor"])
    return both


def _tokenizer_of_both_versions(config: dict[str, Any]) -> dict[str, Any]:
    if config.get("tokenizer_class") == "TokenizersBackend":
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(config.get("extra_special_tokens"), list):  # transformers 4 has this other name for a list
        config["additional_special_tokens"] = config.pop("extra_special_tokens")
    return config


def _rewrite(file: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    text = json.dumps(change(json.loads(file.read_bytes())), indent=2, ensure_ascii=False)
    file.write_text(text + "\n", encoding="utf-8")
