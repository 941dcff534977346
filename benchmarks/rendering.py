"""CPU cost of the gateway's pure parts: rendering, reading answers, wire formats, merging turns.

Workload: the built-in policy's tokenizer and template (a vocabulary of 576, so texts have more tokens than a large
model's), one tool, a session of 200 turns of about 500 tokens. CPU time of this process, best of several rounds, so other
load on the machine matters little.

    python benchmarks/rendering.py [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import agentcore_rl_toolkit
from agentcore_rl_toolkit.messages.render import Renderer
from agentcore_rl_toolkit.messages.wire import DIALECTS, Delta, ModelRequest
from agentcore_rl_toolkit.trajectory import Turn, build_trajectory

WEIGHTS = Path(agentcore_rl_toolkit.__file__).parent / "policy" / "weights"
PROPERTIES = {"expression": {"type": "string", "description": "Like 2 + 3"}}
PARAMETERS = {"type": "object", "properties": PROPERTIES, "required": ["expression"]}
TOOLS = [{"type": "function", "function": {"name": "calculator", "parameters": PARAMETERS}}]


def best_us(call: Callable[[], Any], rounds: int, calls: int) -> float:
    """CPU microseconds per call, the best round."""
    found = float("inf")
    for _ in range(rounds):
        start = time.process_time()
        for _ in range(calls):
            call()
        found = min(found, (time.process_time() - start) / calls)
    return found * 1e6


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def session(renderer: Renderer, turns: int) -> tuple[list[float], int]:
    """CPU microseconds of each turn (prompt, its JSON, commit), and the length of the last prompt."""
    conversation = renderer.conversation()
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Use the calculator."}]
    messages.append({"role": "user", "content": "What is 2 + 3?"})
    text = "12 apples and 30 pears " * 25
    completion = renderer.encode(text + "<|im_end|>")
    spent = []
    length = 0
    for number in range(turns):
        fresh = json.loads(json.dumps(messages))  # as they come off the wire: equal, but not the same objects
        answer = {"role": "assistant", "content": f"{number} {text}"}
        start = time.process_time()
        prompt = renderer.render(conversation, fresh, TOOLS)
        length = len(prompt.json) and prompt.length
        conversation.commit(prompt, completion, answer, turn_id=str(number))
        spent.append((time.process_time() - start) * 1e6)
        messages += [answer, {"role": "user", "content": f"{number} " + "and what is 7 * 8? " * 16}]
    return spent, length


def merged(turns: int, tokens: int) -> list[Turn]:
    source = random.Random(0)
    history: list[int] = []
    made = []
    for index in range(turns):
        history = history + [source.randrange(150_000) for _ in range(tokens // 2)]
        completion = [source.randrange(150_000) for _ in range(tokens // 2)]
        made.append(
            Turn(
                turn_id=str(index),
                index=index,
                prompt_ids=history,
                completion_ids=completion,
                logprobs=[-0.5] * len(completion),
                finish_reason="stop",
            )
        )
        history = history + completion
    return made


# ---------------------------------------------------------------- all of it


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="write rows and checks there")
    asked = parser.parse_args()
    rounds = 3 if asked.quick else 15
    rows: list[tuple[str, str]] = []
    checks: list[dict[str, Any]] = []

    def check(name: str, value: float, target: float, *, least: bool = False) -> None:
        ok = value >= target if least else value <= target
        checks.append({"name": name, "value": round(value, 3), "target": target, "ok": ok})

    start = time.process_time()
    renderer = Renderer.from_path(WEIGHTS)
    rows.append(("load tokenizer and template, probe the template", f"{(time.process_time() - start) * 1e3:.0f} ms"))
    spent, length = session(renderer, 200)
    for name, some in (("2 to 6", spent[1:6]), ("10 to 20", spent[9:20]), ("181 to 200", spent[180:])):
        rows.append((f"prompt of turn {name} (context at the end: {length:,} tokens)", f"{median(some):.0f} us"))
    # The best ones: other load on the machine empties caches, which a late turn feels more.
    check("late turn against early turn, ratio of the best", min(spent[180:]) / min(spent[9:20]), 4.0)
    call = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "12 * 7"}}\n</tool_call><|im_end|>'
    ids = renderer.encode("Let me work that out with care, step by step.\n" + call)
    parse = best_us(lambda: renderer.parse(ids, tools=TOOLS), rounds, 100)
    rows.append((f"read an answer of {len(ids)} tokens with a call", f"{parse:.0f} us"))

    def streamed() -> None:
        stream = renderer.stream(tools=TOOLS)
        for token in ids:
            stream.feed([token])
        stream.feed([], final=True)

    rows.append(("read it token by token, per token", f"{best_us(streamed, rounds, 20) / len(ids):.1f} us"))
    for name in ("chat", "responses", "anthropic"):
        encoder = DIALECTS[name].encoder(ModelRequest(dialect=name, model="m", stream=True), reply_id="x")
        encoder.start()
        rows.append(
            (
                f"write one streamed piece of text, {name}",
                f"{best_us(lambda e=encoder: e.feed(Delta(text='word ')), rounds, 1000):.1f} us",
            )
        )  # type: ignore[misc]
    for turns, tokens in ((20, 500), (1000, 40)):
        made = merged(turns, tokens)
        cost = best_us(lambda m=made: build_trajectory("s", m), rounds, 1)  # type: ignore[misc]
        rows.append((f"merge {turns} turns of {tokens} new tokens", f"{cost / 1e3:.1f} ms"))
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:<{width}}  {value:>10}")
    for each in checks:
        print(f"{'ok  ' if each['ok'] else 'MISS'} {each['name']}: {each['value']} (target {each['target']})")
    if asked.json is not None:
        asked.json.write_text(json.dumps({"rows": rows, "checks": checks}, indent=1))


if __name__ == "__main__":
    main()
