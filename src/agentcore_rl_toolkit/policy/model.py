"""The network: an ordinary Qwen3 causal language model of 0.3 million parameters, which every engine for Qwen3 can load."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from ..errors import ConfigError

WEIGHTS_DIR = Path(__file__).parent / "weights"
WEIGHTS_FILE = "model.safetensors"
TOKENIZER_FILE = "tokenizer.json"
TEMPLATE_FILE = "chat_template.jinja"
END_OF_TEXT, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
TOOL_MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<tools>", "</tools>")


@dataclass(frozen=True, kw_only=True)
class PolicyShape:
    """Size of a policy. ``head_size`` 32 is the smallest that vLLM's CPU build has attention kernels for."""

    hidden: int = 96
    layers: int = 2
    heads: int = 4
    head_size: int = 32
    feed_forward: int = 288
    context: int = 1024


def new_model(tokenizer: Any, shape: PolicyShape, *, seed: int) -> Any:
    """A randomly initialised ``Qwen3ForCausalLM`` for a tokenizer of transformers.

    The vocabulary has no padding rows: every id that it can sample can be decoded.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden,
        intermediate_size=shape.feed_forward,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        head_dim=shape.head_size,
        max_position_embeddings=shape.context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model


def load_policy(directory: str | Path | None = None) -> tuple[Any, Any]:
    """``(model, tokenizer)`` as transformers objects, fp32, in evaluation mode: what a trainer starts from.

    Without a directory: the warm-started policy that ships with the package.
    Raises: ConfigError when the directory does not hold a policy.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = check_directory(directory)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return model.eval(), tokenizer


def check_directory(directory: str | Path | None) -> Path:
    """The directory as a path if it holds a policy; None stands for the shipped one. Raises: ConfigError."""
    folder = WEIGHTS_DIR if directory is None else Path(directory)
    missing = [name for name in ("config.json", TOKENIZER_FILE) if not (folder / name).is_file()]
    missing += [file.name for file in weight_files(folder) if not file.is_file()]
    if missing:
        raise ConfigError(f"{folder} does not hold a policy: {', '.join(missing)} not found")
    return folder


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights: one, or those that an index names."""
    index = folder / f"{WEIGHTS_FILE}.index.json"
    if (folder / WEIGHTS_FILE).is_file() or not index.is_file():
        return [folder / WEIGHTS_FILE]
    return [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]


def save_policy(model: Any, directory: str | Path, *, tokenizer_from: str | Path | None = None) -> Path:
    """Write model and tokenizer so that `load_policy`, `policy serve`, vLLM and SGLang can load the directory.

    The tokenizer files are copied from ``tokenizer_from``, by default the shipped ones.
    """
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    source = WEIGHTS_DIR if tokenizer_from is None else Path(tokenizer_from)
    if source.resolve() != folder.resolve():
        for name in (TOKENIZER_FILE, "tokenizer_config.json", TEMPLATE_FILE):
            (folder / name).write_bytes((source / name).read_bytes())
    return folder


def chat_tokenizer(tokenizer: Tokenizer, template: str) -> Any:
    """A tokenizer as transformers knows it, with the marks of the built-in policy; `new_model` takes it, and it saves itself."""
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=END_OF_TEXT, extra_special_tokens=[START]
    )
    fast.chat_template = template
    fast.padding_side = "left"
    fast.model_max_length = PolicyShape.context
    return fast
