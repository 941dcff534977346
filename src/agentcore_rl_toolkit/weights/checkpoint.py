"""A model's weights as a folder that engines load."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

WEIGHTS_FILE = "model.safetensors"


def write_checkpoint(model: Any, folder: Path) -> Path:
    """Write the weights of a model of transformers, or of peft around one, all or nothing. Returns the folder.

    Adapters are merged into the weights for the export and taken out again. An output head that shares its matrix with the
    embedding (tied weights) is stored once.
    """
    from safetensors.torch import save_file

    partial = folder.with_name(folder.name + ".new")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    merged = hasattr(model, "merge_adapter")
    if merged:
        model.merge_adapter()
    try:
        tensors = {name: p.detach().cpu().contiguous() for name, p in plain_parameters(model)}
        save_file(tensors, partial / WEIGHTS_FILE, metadata={"format": "pt"})
    finally:
        if merged:
            model.unmerge_adapter()
    model.config.save_pretrained(partial)
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(partial, folder)
    return folder


def plain_parameters(model: Any) -> list[tuple[str, Any]]:
    """(name, tensor) as the model without adapters would name them; each tensor once."""
    found: list[tuple[str, Any]] = []
    for name, parameter in model.named_parameters():
        # peft keeps the frozen original beside each fully trained module; only the trained one is the policy.
        if "lora_" in name or ".original_module." in name:
            continue
        plain = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
        found.append((plain.replace(".modules_to_save.default.", "."), parameter))
    return found
