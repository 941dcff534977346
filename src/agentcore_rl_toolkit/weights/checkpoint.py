"""A model's weights as a folder that engines load."""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .folders import complete_folder
from .sharded import is_sharded, plain_name, whole

WEIGHTS_FILE = "model.safetensors"


def write_checkpoint(model: Any, folder: Path, *, write: bool = True) -> Path:
    """Write the weights of a model of transformers, or of peft around one, all or nothing. Returns the folder.

    Each process of a run whose model is split calls it, and only one with ``write``.

    Adapters are merged into copies of the weights: the model stays as it is, to the last bit. An output head that shares its
    matrix with the embedding (tied weights) is stored once. Raises: ConfigError for adapters of such a matrix.
    """
    from safetensors.torch import save_file

    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    wrapped = any(hasattr(end, name) for end in ends for name in ("get_base_layer", "modules_to_save"))
    if wrapped and getattr(model.config, "tie_word_embeddings", False):
        raise ConfigError(
            "adapters of the output head or the embedding would be lost: the model ties both to one matrix. Leave lm_head and "
            "embed_tokens out of target_modules and modules_to_save"
        )
    tensors: dict[str, Any] = {}
    split = is_sharded(model)  # then what is brought together is given back after the block
    with whole(model):
        for name, parameter in plain_parameters(model):
            tensor = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
            if write:
                tensors[name] = tensor.detach().to("cpu", copy=split).contiguous()
    if not write:
        return folder
    partial = folder.with_name(folder.name + ".new")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    save_file(tensors, partial / WEIGHTS_FILE, metadata={"format": "pt"})
    model.config.save_pretrained(partial)
    complete_folder(partial)
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(partial, folder)
    return folder


def plain_parameters(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name, tensor) as the model without adapters would name them, each tensor once."""
    adapted = {plain_name(name): layer for name, layer in model.named_modules() if hasattr(layer, "get_base_layer")}
    for given, parameter in model.named_parameters():
        name = plain_name(given)
        layer_name, base, part = name.partition(".base_layer.")
        # peft keeps the frozen original of each fully trained module; only the trained one is the policy.
        if "lora_" in name or ".original_module." in name:
            continue
        if base and layer_name in adapted:
            layer = copy.deepcopy(adapted[layer_name])  # one at a time: all of them would be a second model
            layer.merge()
            parameter = layer.get_base_layer().get_parameter(part)
        plain = layer_name.removeprefix("base_model.model.") + (f".{part}" if base else "")
        yield plain.replace(".modules_to_save.default.", "."), parameter
