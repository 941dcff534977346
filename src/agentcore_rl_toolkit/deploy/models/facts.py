"""A model's folder as a service sees it: its architecture, size and context, and why a service would refuse it."""

from __future__ import annotations

import fnmatch
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
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
_MARGIN = 1.15  # vLLM takes nine tenths of the memory, and activations need some of it

# What Bedrock imports. Source: User guide of Amazon Bedrock, "Import a pre-trained model", October 2026.
IMPORTED = """GPTBigCodeForCausalLM GptOssForCausalLM LlamaForCausalLM MistralForCausalLM MixtralForCausalLM
    MllamaForConditionalGeneration Qwen2ForCausalLM Qwen2VLForConditionalGeneration Qwen2_5_VLForConditionalGeneration
    Qwen3ForCausalLM Qwen3MoeForCausalLM T5ForConditionalGeneration"""
IMPORT_REGIONS = ("us-east-1", "us-east-2", "us-west-2", "eu-central-1")
_IMPORT_CONTEXT = 128 * 1024
# A trainer's state and second copies of the weights, which no server reads, and secrets.
_NOT_THE_MODEL = (".*", "*.bin", "*.ckpt", "*.pt", "*.pth", "*.env", "*.key", "*.pem", "trainer_state.json")


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """The facts about a model's folder.

    Attributes:
        architecture: class name in transformers, from config.json.
        bytes: size of the weights.
        dtype: type of the weights.
        context: largest number of positions, 0 if config.json has none.
        takes_tools: whether the chat template writes tools.
        tool_parser: vLLM's parser of its tool calls; None: it calls no tools.
        heads: attention heads, which the GPUs share evenly.
        cache_bytes: size of the keys and values of one context. vLLM does not start without room for them.
    """

    folder: Path
    architecture: str
    bytes: int
    dtype: str
    context: int
    takes_tools: bool
    tool_parser: str | None = None
    heads: int = 0
    cache_bytes: int = 0

    @property
    def size(self) -> str:
        """Architecture and size, for people."""
        size = f"{self.bytes / GB:.1f} GB" if self.bytes >= GB / 10 else f"{self.bytes / 10**6:.1f} MB"
        return f"{self.architecture}, {size} in {self.dtype}"

    @property
    def files(self) -> list[Path]:
        """The files that a server needs, in a fixed order."""
        return sorted(
            file
            for file in self.folder.iterdir()
            if file.is_file() and not any(fnmatch.fnmatch(file.name, pattern) for pattern in _NOT_THE_MODEL)
        )

    @cached_property
    def digest(self) -> str:
        """Twelve hexadecimal digits of the content of all files."""
        found = hashlib.sha256()
        for file in self.files:
            found.update(f"{file.name}\0{file.stat().st_size}\0".encode())
            with file.open("rb") as content:
                found.update(hashlib.file_digest(content, "sha256").digest())
        return found.hexdigest()[:12]


def read_model(folder: Path) -> ModelFacts:
    """Read a folder. Raises: ConfigError for an incomplete folder."""
    wanted = ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "*.safetensors")
    missing = [name for name in wanted if not any(folder.glob(name))]
    if missing:
        raise ConfigError(f"{folder} is not a complete model: {', '.join(missing)} is missing")
    config: Mapping[str, Any] = json.loads((folder / "config.json").read_text())
    text: Mapping[str, Any] = config.get("text_config") or config
    names = ("max_position_embeddings", "num_attention_heads", "hidden_size", "num_hidden_layers")
    context, heads, width, depth = (int(text.get(name) or 0) for name in names)
    layers = text.get("layer_types") or ["full_attention"] * depth
    per_head = text.get("head_dim") or width // max(heads, 1)
    # A key and a value of two bytes for each number of each head, in each layer that attends to all positions.
    numbers = layers.count("full_attention") * int(text.get("num_key_value_heads") or heads) * int(per_head)
    return ModelFacts(
        folder=folder,
        architecture=str((config.get("architectures") or ["unknown"])[0]),
        bytes=sum(file.stat().st_size for file in folder.glob("*.safetensors")),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "unknown"),
        context=context,
        takes_tools="tools" in (folder / "chat_template.jinja").read_text(),
        heads=heads,
        cache_bytes=2 * 2 * numbers * context,
    )


def instance_for(facts: ModelFacts, wanted: str | None) -> tuple[str, int]:
    """Return the smallest instance for a model, or the wanted one, and how many of its GPUs share the model.

    Raises: ConfigError if the model does not fit.
    """
    needed = (facts.bytes + facts.cache_bytes) * _MARGIN / GB
    for name, (all_gpus, memory) in INSTANCES.items():
        gpus = math.gcd(all_gpus, facts.heads)  # each has as many heads
        if wanted in (None, name) and needed <= memory * gpus / all_gpus:
            return name, gpus
    if wanted is not None and wanted not in INSTANCES:
        return wanted, 1
    raise ConfigError(
        f"the model needs about {needed:.0f} GB of GPU memory, for {facts.size} and a context of {facts.context}: "
        + ("name an instance with --instance" if wanted is None else f"{wanted} has less. Choose a larger --instance")
        + ", or lower max_position_embeddings in config.json"
    )


def refusals_of_import(facts: ModelFacts, region: str) -> list[str]:
    """Return the reasons why Bedrock would not import a model, or why an agent could not use it there."""
    oss = facts.architecture == "GptOssForCausalLM"
    checks = {
        f"Bedrock does not import the architecture {facts.architecture}": facts.architecture in IMPORTED.split(),
        f"Bedrock imports models in {', '.join(IMPORT_REGIONS)} only, not in {region}": region in IMPORT_REGIONS,
        "Bedrock imports gpt-oss in us-east-1 only": not oss or region == "us-east-1",
        f"the weights have {facts.bytes / GB:.0f} GB, and Bedrock imports less than 200 GB": facts.bytes < 200 * GB,
        f"config.json allows {facts.context} positions, and Bedrock imports less than {_IMPORT_CONTEXT}: lower "
        "max_position_embeddings": facts.context < _IMPORT_CONTEXT,
        "Bedrock documents tool calls of imported models for gpt-oss only: an agent with tools needs --to sagemaker "
        "(--tool-parser none if yours uses none)": not facts.takes_tools or oss,
    }
    return [reason for reason, holds in checks.items() if not holds]
