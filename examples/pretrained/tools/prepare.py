"""Write the files of the example: the model with a chat template that knows tools, the rows, and the demonstrations.

python examples/pretrained/tools/prepare.py MODEL runs/pretrained-tools
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import shop
from strands.models.openai import OpenAIModel

import agentcore_rl_toolkit.policy
from agentcore_rl_toolkit.cli.models import model_folder
from agentcore_rl_toolkit.messages.render import Renderer

HERMES = Path(agentcore_rl_toolkit.policy.__file__).parent / "weights" / "chat_template.jinja"


def with_tools(model: Path, folder: Path) -> Path:
    """A copy of a ChatML model whose template shows it tools, their calls and their results."""
    if not folder.is_dir():
        shutil.copytree(model, folder)
    shutil.copyfile(HERMES, folder / "chat_template.jinja")
    return folder


def offered() -> list[dict[str, Any]]:
    """The agent's tools as Strands sends them."""
    specs = [each.tool_spec for each in (shop.price_list({}), shop.multiply)]
    return OpenAIModel(model_id="").format_request([], specs)["tools"]


def demonstration(renderer: Renderer, row: dict[str, Any]) -> dict[str, Any]:
    """Return an expert's rollout of a row in the form of `runs export`: ids, and a mask of the expert's tokens.

    The renderer makes the ids turn by turn, as the gateway does for a rollout.
    """
    conversation, tools = renderer.conversation(), offered()
    messages = [{"role": "system", "content": shop.SYSTEM_PROMPT}, {"role": "user", "content": row["prompt"]}]
    ids: list[int] = []
    mask: list[int] = []
    for number, (reply, result) in enumerate(shop.steps(row)):
        prompt = renderer.render(conversation, messages, tools)
        said = renderer.encode(reply + "<|im_end|>")
        mask += [0] * (prompt.length - len(ids)) + [1] * len(said)
        ids = [*prompt.token_ids, *said]
        message = renderer.parse(said, tools=tools).to_message()
        conversation.commit(prompt, said, message, turn_id=str(number))
        results = [
            {"role": "tool", "tool_call_id": c["id"], "content": result} for c in message.get("tool_calls") or ()
        ]
        messages = [*messages, message, *results]
    return {"input_ids": ids, "assistant_masks": mask, "reward": 1.0}


def rows(seed: str, n: int, seen: set[str]) -> Iterator[dict[str, Any]]:
    """Return new questions."""
    rng = random.Random(seed)
    while n:
        row = shop.question(rng)
        if row["prompt"] not in seen:
            seen.add(row["prompt"])
            n -= 1
            yield row


def write(path: Path, lines: Iterator[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--demonstrations", type=int, default=32)
    parser.add_argument("--train", type=int, default=64)
    parser.add_argument("--held-out", type=int, default=96)
    a = parser.parse_args()
    model = with_tools(model_folder(a.model), a.folder / "model")
    renderer, seen = Renderer.from_path(model), set[str]()
    write(a.folder / "held_out.jsonl", rows("held out", a.held_out, seen))
    write(a.folder / "train.jsonl", rows("train", a.train, seen))
    shown = rows("demonstrations", a.demonstrations, seen)
    write(a.folder / "demonstrations.jsonl", (demonstration(renderer, row) for row in shown))


if __name__ == "__main__":
    main()
