"""Make the weights that ship with the package: ``make policy``, or this file with ``--out DIR``.

Four parts, a few minutes on two cores, the same weights again on the same machine with the same seed and thread count:

1. a byte-level BPE tokenizer, from rendered demonstrations;
2. supervised training on clean demonstrations. Form comes first, then, within some fifty steps, copying numbers: that is when
   an attention circuit for copying appears, and no reward is to be had before it;
3. supervised training on deliberately sloppy demonstrations (`demonstrations.demonstrate`). The reward falls to about 0.2 while
   every right action keeps a probability worth speaking of, which is what lets reinforcement learning climb fast from there.
   Sloppy demonstrations from the beginning do not work: copying never appears;
4. a check: reward at temperature 1 on held-out problems, as the example agent would see it.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from demonstrations import EXAMPLE_AGENT, demonstrate, varied_surroundings
from rollouts import measure
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from agentcore_rl_toolkit.policy.model import WEIGHTS_DIR, save_policy
from agentcore_rl_toolkit.policy.word_problems import generate
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


@dataclass(frozen=True, kw_only=True)
class WarmStartConfig:
    """Settings of a warm start. Learning rates are peaks; both parts warm up and decay linearly to a twentieth."""

    seed: int = 0
    vocabulary: int = 576
    shape: PolicyShape = field(default_factory=PolicyShape)
    batch: int = 16
    clean_steps: int = 2000
    clean_rate: float = 4e-3
    sloppy_steps: int = 160
    sloppy_rate: float = 6e-4
    expert_share: float = 0.25
    varied_share: float = 0.6
    context_weight: float = (
        0.1  # of the loss on tokens that others wrote, beside 1 on the assistant's: helps copying appear
    )


def build_tokenizer(template: str, *, vocabulary: int, seed: int, conversations: int = 4000) -> Any:
    """A byte-level BPE tokenizer with single digits. Every text can be encoded; bytes without a merge are tokens themselves."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    marks = (END_OF_TEXT, START, END)
    tokenizer.add_special_tokens(list(marks))
    renderer = chat_tokenizer(tokenizer, template)
    rng = random.Random(seed)
    stream = generate("train", seed=seed)
    texts: list[str] = []
    for k in range(conversations):
        around = EXAMPLE_AGENT if k % 2 else varied_surroundings(rng)
        messages = demonstrate(next(stream), around, rng)
        text = renderer.apply_chat_template(messages, tools=around.tools, tokenize=False)
        for mark in (*marks, *TOOL_MARKS):
            text = text.replace(mark, " ")
        texts.append(text)
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
    return chat_tokenizer(tokenizer, template)


def batches(tokenizer: Any, config: WarmStartConfig, *, expert_share: float, seed: str) -> Iterator[Batch]:
    """Endless batches of demonstrations on problems of the train split."""
    rng = random.Random(seed)
    stream = generate("train", seed=rng.randrange(2**31))
    header = tokenizer(f"{START}assistant\n")["input_ids"]
    while True:
        rows: list[list[int]] = []
        for _ in range(config.batch):
            around = varied_surroundings(rng) if rng.random() < config.varied_share else EXAMPLE_AGENT
            messages = demonstrate(next(stream), around, rng, expert_share=expert_share)
            rows.append(tokenizer.apply_chat_template(messages, tools=around.tools)["input_ids"])
        width = max(map(len, rows))
        ids_BT = torch.full((len(rows), width), tokenizer.pad_token_id)
        weights_BT = torch.zeros(len(rows), width)
        for b, row in enumerate(rows):
            ids_BT[b, : len(row)] = torch.tensor(row)
            weights_BT[b, : len(row)] = config.context_weight
            for first, last in assistant_spans(row, header, tokenizer.eos_token_id):
                weights_BT[b, first:last] = 1.0
        yield Batch(ids_BT=ids_BT, weights_BT=weights_BT)


def warm_start(config: WarmStartConfig, out: Path, *, log: Callable[[str], None] = print) -> float:
    """Make tokenizer and weights in ``out``; returns the reward of the example agent on held-out problems at temperature 1."""
    torch.manual_seed(config.seed)
    template = (WEIGHTS_DIR / TEMPLATE_FILE).read_text(encoding="utf-8")
    tokenizer = build_tokenizer(template, vocabulary=config.vocabulary, seed=config.seed)
    tokenizer.save_pretrained(out)
    model = new_model(tokenizer, config.shape, seed=config.seed)
    log(f"tokenizer {len(tokenizer)} tokens, model {sum(p.numel() for p in model.parameters()):,} parameters")
    log(f"clean demonstrations, {config.clean_steps} steps")
    clean = batches(tokenizer, config, expert_share=1.0, seed=f"clean/{config.seed}")
    train(model, clean, steps=config.clean_steps, peak_rate=config.clean_rate, log=log)
    log(f"  held-out reward {measure(model, tokenizer, n=200, seed=config.seed).reward:.3f}")
    log(f"sloppy demonstrations, {config.sloppy_steps} steps")
    sloppy = batches(tokenizer, config, expert_share=config.expert_share, seed=f"sloppy/{config.seed}")
    train(model, sloppy, steps=config.sloppy_steps, peak_rate=config.sloppy_rate, log=log)
    save_policy(model, out, tokenizer_from=out)
    reward = measure(model, tokenizer, n=400, seed=config.seed).reward
    log(f"  held-out reward {reward:.3f}; written to {out}")
    return reward


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--out", type=Path, default=WEIGHTS_DIR, help="where to write (default: the package's own weights)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="more is faster, but gives slightly other weights")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    started_s = time.monotonic()
    reward = warm_start(WarmStartConfig(seed=options.seed), options.out, log=lambda line: print(line, flush=True))
    print(f"{time.monotonic() - started_s:.0f} s")
    if not 0.10 <= reward <= 0.33:
        print(f"start reward {reward:.3f} is outside 0.10..0.33: try another seed or expert_share", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
