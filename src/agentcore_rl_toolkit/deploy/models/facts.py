"""A model's folder as a service sees it: its architecture, size and context, and why a service would refuse it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import ConfigError

GB = 10**9
# Number of GPUs, and their memory in GB. Source: EC2's pages of the instance families.
INSTANCES: dict[str, tuple[int, int]] = {
    "ml.g6.xlarge": (1, 24),
    "ml.g6.2xlarge": (1, 24),
    "ml.g5.2xlarge": (1, 24),
    "ml.g6e.2xlarge": (1, 48),
    "ml.g6.12xlarge": (4, 96),
    "ml.g5.12xlarge": (4, 96),
    "ml.g6e.12xlarge": (4, 192),
    "ml.p4d.24xlarge": (8, 320),
    "ml.p5.48xlarge": (8, 640),
}
_BESIDE_WEIGHTS = 1.25  # the key-value cache and activations need a fourth of the weights' size at the least

# What Bedrock imports. Source: User guide of Amazon Bedrock, "Import a pre-trained model", October 2026.
IMPORTED = frozenset(
    {
        "GPTBigCodeForCausalLM",
        "GptOssForCausalLM",
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "MixtralForCausalLM",
        "MllamaForConditionalGeneration",
        "Qwen2ForCausalLM",
        "Qwen2VLForConditionalGeneration",
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
        "T5ForConditionalGeneration",
    }
)
IMPORT_REGIONS = ("us-east-1", "us-east-2", "us-west-2", "eu-central-1")
_IMPORT_BYTES, _IMPORT_CONTEXT = 200 * GB, 128 * 1024


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """The facts about a model's folder.

    Attributes:
        architecture: class name in transformers, from config.json.
        bytes: size of the weights.
        dtype: type of the weights.
        context: largest number of positions. None if config.json has none.
        takes_tools: whether the chat template writes tools.
        digest: of all files; the same weights have the same.
        tool_parser: vLLM's parser of its tool calls; None: it calls no tools.
    """

    folder: Path
    architecture: str
    bytes: int
    dtype: str
    context: int | None
    takes_tools: bool
    digest: str
    tool_parser: str | None = None

    @property
    def size(self) -> str:
        """Architecture and size, for people."""
        return f"{self.architecture}, {self.bytes / GB:.2f} GB in {self.dtype}"

    @property
    def files(self) -> list[Path]:
        """The files of the folder, which are uploaded."""
        return _files(self.folder)


def read_model(folder: Path) -> ModelFacts:
    """Read a folder. Raises: ConfigError for an incomplete folder."""
    missing = [
        name for name in ("config.json", "tokenizer.json", "tokenizer_config.json") if not (folder / name).is_file()
    ]
    weights = list(folder.glob("*.safetensors"))
    if missing or not weights:
        raise ConfigError(f"{folder} is not a complete model: {', '.join(missing) or '*.safetensors'} is missing")
    config: Mapping[str, Any] = json.loads((folder / "config.json").read_text())
    text: Mapping[str, Any] = config.get("text_config") or config
    context = text.get("max_position_embeddings")
    template = folder / "chat_template.jinja"
    if not template.is_file():
        raise ConfigError(f"{folder} has no chat_template.jinja: the service could not render messages")
    return ModelFacts(
        folder=folder,
        architecture=str((config.get("architectures") or ["unknown"])[0]),
        bytes=sum(file.stat().st_size for file in weights),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "unknown"),
        context=None if context is None else int(context),
        takes_tools="tools" in template.read_text(),
        digest=_digest(folder),
    )


def instance_for(facts: ModelFacts, wanted: str | None) -> tuple[str, int]:
    """Return the smallest instance for a model, or the wanted one, and its number of GPUs. Raises: ConfigError."""
    needed = facts.bytes * _BESIDE_WEIGHTS / GB
    if wanted is None:
        for name, (gpus, memory) in INSTANCES.items():
            if needed <= memory:
                return name, gpus
        raise ConfigError(f"the model needs about {needed:.0f} GB of GPU memory: name an instance with --instance")
    gpus, memory = INSTANCES.get(wanted, (1, 0))
    if memory and needed > memory:
        raise ConfigError(
            f"{wanted} has {memory} GB of GPU memory, and the model needs about {needed:.0f} GB (weights of "
            f"{facts.bytes / GB:.1f} GB in {facts.dtype}): choose a larger --instance, or --dtype bfloat16"
        )
    return wanted, gpus


def refusals_of_import(facts: ModelFacts, region: str, *, force: bool = False) -> list[str]:
    """Return the reasons why Bedrock would not import a model, or why an agent could not use it there."""
    oss = facts.architecture == "GptOssForCausalLM"
    checks = {
        f"Bedrock does not import the architecture {facts.architecture}": facts.architecture in IMPORTED,
        f"Bedrock imports models in {', '.join(IMPORT_REGIONS)} only, not in {region}": region in IMPORT_REGIONS,
        "Bedrock imports gpt-oss in us-east-1 only": not oss or region == "us-east-1",
        f"the weights have {facts.bytes / GB:.0f} GB, and Bedrock imports less than {_IMPORT_BYTES // GB} GB": (
            facts.bytes < _IMPORT_BYTES
        ),
        f"config.json allows {facts.context} positions, and Bedrock imports less than {_IMPORT_CONTEXT}: lower "
        "max_position_embeddings": facts.context is None or facts.context < _IMPORT_CONTEXT,
        "Bedrock documents tool calls of imported models for gpt-oss only: an agent with tools needs --to sagemaker (--force "
        "if yours uses none)": not facts.takes_tools or oss or force,
    }
    return [reason for reason, holds in checks.items() if not holds]


def _files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.is_file() and not file.name.startswith("."))


def _digest(folder: Path) -> str:
    found = hashlib.sha256()
    for file in _files(folder):
        found.update(f"{file.name}\0{file.stat().st_size}\0".encode())
        with file.open("rb") as content:
            while chunk := content.read(2**22):
                found.update(chunk)
    return found.hexdigest()[:12]
