"""Train a small policy on demonstrations: tokenizer, chat template and weights for `agentcore-rl train --model DIR`.

`python warm_start.py --data DIR --out DIR` runs in the toolkit's environment, with the files of `data.py`. The policy has the
architecture of the built-in one (Qwen3), and is larger. In its tokenizer, each word of this domain is one token. Its chat
template is the built-in one, except that only the name of a tool is written.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from agentcore_rl_toolkit.policy.model import WEIGHTS_DIR, save_policy
from agentcore_rl_toolkit.weights.folders import TEMPLATE_FILE
from small_model import (
    END,
    END_OF_TEXT,
    START,
    TOOL_MARKS,
    Batch,
    PolicyShape,
    assistant_spans,
    chat_tokenizer,
    new_model,
    train,
)

Conversation = list[dict[str, Any]]

# What a token may span: the frame of a call, an argument's name, a role's line, a word with its space, signs, a space.
_PIECES = Regex(
    r'\n?\{"name": "|", "arguments": \{| ?"[a-z_]+": "?|(?:user|assistant|system)\n'
    r"| ?[\p{L}\p{N}_.'-]+|[^\s\p{L}\p{N}_.'-]+\n?|\s"
)
_TOOL_LINE = "{{- '\\n' + (tool | tojson(sort_keys=true)) -}}"
_TOOL_NAME = "{{- ' ' + (tool.function or tool).name -}}"


@dataclass(frozen=True, kw_only=True)
class Settings:
    seed: int = 0
    shape: PolicyShape = field(default_factory=lambda: PolicyShape(hidden=96, layers=2, feed_forward=288, context=1536))
    vocabulary: int = 1200
    batch: int = 8
    steps: int = 400  # steps with careful demonstrations
    rate: float = 4e-3
    careless_steps: int = 50
    careless_rate: float = 1e-3
    context_weight: float = 0.1  # weight of the tokens of other authors in the loss; tokens of the policy have 1


def chat_template() -> str:
    """The built-in template with short tools. Raises: ValueError if the built-in template changed."""
    template = (WEIGHTS_DIR / TEMPLATE_FILE).read_text(encoding="utf-8")
    if template.count(_TOOL_LINE) != 1:
        raise ValueError(f"{TEMPLATE_FILE} of the built-in policy writes tools in another way than this file expects")
    return template.replace(_TOOL_LINE, _TOOL_NAME)


def build_tokenizer(texts: Sequence[str], *, vocabulary: int) -> Any:
    """Byte-level BPE whose tokens may be whole words; every text can be encoded."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(_PIECES, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    marks = (END_OF_TEXT, START, END)
    tokenizer.add_special_tokens(list(marks))
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocabulary - len(TOOL_MARKS),
            special_tokens=list(marks),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in TOOL_MARKS])
    return chat_tokenizer(tokenizer, chat_template())


def texts_of(conversations: Sequence[Conversation], tools: Sequence[dict[str, Any]]) -> list[str]:
    """Return each conversation as the template writes it, without the marks that are separate tokens."""
    bare = Tokenizer(models.BPE())
    bare.add_special_tokens([END_OF_TEXT, START, END])
    renderer = chat_tokenizer(bare, chat_template())
    texts = []
    for messages in conversations:
        text = renderer.apply_chat_template(messages, tools=tools, tokenize=False)
        for mark in (END_OF_TEXT, START, END, *TOOL_MARKS):
            text = text.replace(mark, "\0")
        texts += [piece for piece in text.split("\0") if piece]
    return texts


def batches(
    rows: Sequence[tuple[list[int], list[tuple[int, int]]]], pad_id: int, settings: Settings
) -> Iterator[Batch]:
    """Endless batches of rows of about the same length, so that little is padding."""
    rng = random.Random(f"warm start/{settings.seed}")
    ready: list[list[int]] = []
    while True:
        if not ready:
            order = list(range(len(rows)))
            rng.shuffle(order)
            order.sort(key=lambda k: len(rows[k][0]) // 64)
            ready = [order[k : k + settings.batch] for k in range(0, len(order), settings.batch)]
            rng.shuffle(ready)
        chosen = [rows[k] for k in ready.pop()]
        width = max(len(ids) for ids, _ in chosen)
        ids_BT = torch.full((len(chosen), width), pad_id)
        weights_BT = torch.zeros(len(chosen), width)
        for b, (ids, spans) in enumerate(chosen):
            ids_BT[b, : len(ids)] = torch.tensor(ids)
            weights_BT[b, : len(ids)] = settings.context_weight
            for first, last in spans:
                weights_BT[b, first:last] = 1.0
        yield Batch(ids_BT=ids_BT, weights_BT=weights_BT)


def warm_start(data: Path, out: Path, settings: Settings, *, log: Callable[[str], None] = print) -> Path:
    """Make the policy in ``out`` from ``careful.jsonl``, then ``careless.jsonl``, and ``tools.json``; returns ``out``."""
    shown = {name: [json.loads(line) for line in (data / f"{name}.jsonl").open()] for name in ("careful", "careless")}
    tools = json.loads((data / "tools.json").read_text())
    tokenizer = build_tokenizer(texts_of(shown["careful"], tools), vocabulary=settings.vocabulary)
    tokenizer.save_pretrained(out)
    header = tokenizer(f"{START}assistant\n")["input_ids"]
    torch.manual_seed(settings.seed)
    model = new_model(tokenizer, settings.shape, seed=settings.seed)
    log(f"vocabulary {len(tokenizer)}, {sum(p.numel() for p in model.parameters()):,} parameters")
    phases = (("careful", settings.steps, settings.rate), ("careless", settings.careless_steps, settings.careless_rate))
    for name, steps, rate in phases:
        rows = []
        for messages in shown[name]:
            ids = tokenizer.apply_chat_template(messages, tools=tools)["input_ids"]
            rows.append((ids, assistant_spans(ids, header, tokenizer.eos_token_id)))
        lengths = [len(ids) for ids, _ in rows]
        log(f"{len(rows)} {name} demonstrations of {sum(lengths) / len(rows):.0f} tokens (longest {max(lengths)})")
        if steps:
            train(model, batches(rows, tokenizer.pad_token_id, settings), steps=steps, peak_rate=rate, log=log)
    return save_policy(model, out, tokenizer_from=out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder that data.py wrote")
    parser.add_argument("--out", type=Path, required=True, help="folder for the policy")
    parser.add_argument("--steps", type=int, default=Settings.steps)
    parser.add_argument("--careless-steps", type=int, default=Settings.careless_steps)
    parser.add_argument("--seed", type=int, default=Settings.seed)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    started = time.process_time()
    settings = Settings(seed=options.seed, steps=options.steps, careless_steps=options.careless_steps)
    warm_start(options.data, options.out, settings, log=lambda line: print(line, flush=True))
    print(f"written to {options.out}; {time.process_time() - started:.0f} s of CPU")


if __name__ == "__main__":
    main()
