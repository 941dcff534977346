"""Hand the trainer's weights to the policy server."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from ..._servers.keys import key_for
from ...errors import PolicyError


def export_weights(model: Any, path: Path) -> None:
    """Write a model's parameters as one safetensors file, atomically.

    A LoRA adapter is merged into the weights for the export and taken out again, so the server sees plain model names.
    Tied weights are stored once.
    """
    from safetensors.torch import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".new")
    merged = hasattr(model, "merge_adapter")
    if merged:
        model.merge_adapter()
    try:
        save_file({n: p.detach().cpu().contiguous() for n, p in _plain_parameters(model)}, partial)
    finally:
        if merged:
            model.unmerge_adapter()
    os.replace(partial, path)


def publish_weights(policy_url: str, path: Path, version: int, *, timeout_s: float = 60.0) -> None:
    """Tell the policy server to load a file in place; its next token comes from these weights and says `version`.

    Raises: PolicyError when the server cannot be reached or refuses.
    """
    body = json.dumps({"path": str(path.resolve()), "version": version}).encode()
    headers = {"content-type": "application/json"}
    key = key_for("policy", policy_url, "AGENTCORE_RL_POLICY_ADMIN_KEY")
    if key is not None:
        headers["authorization"] = f"Bearer {key}"
    request = urllib.request.Request(f"{policy_url.rstrip('/')}/update_weights", data=body, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as reply:
            reply.read()
    except urllib.error.HTTPError as e:
        raise PolicyError(f"the policy server refused weights {version}: {e.code} {e.read(2000).decode()}") from e
    except OSError as e:
        raise PolicyError(f"the policy server at {policy_url} did not take weights {version}: {e}") from e


def _plain_parameters(model: Any) -> list[tuple[str, Any]]:
    """(name, tensor) as the model without adapters would name them; each tensor once."""
    found: list[tuple[str, Any]] = []
    for name, parameter in model.named_parameters():
        # peft keeps the frozen original beside each fully trained module; only the trained one is the policy.
        if "lora_" in name or ".original_module." in name:
            continue
        plain = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
        found.append((plain.replace(".modules_to_save.default.", "."), parameter))
    return found
