"""Write the reference data of the model families: prompts of public templates, and what vLLM's parsers read.

python scripts/family_reference.py prompts TEMPLATES   # TEMPLATES: models/templates of ggml-org/llama.cpp, as a folder
python scripts/family_reference.py outputs             # in an environment with vLLM: .venvs/vllm, from `make vllm-env`

Both replace a file in tests/messages/render/reference. The conversations and the outputs come from a seeded generator, so two
runs give the same file. Templates are rendered by transformers and are not kept.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import importlib.metadata
import json
import lzma
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "tests" / "messages" / "render" / "reference"
SEED = 20261129
CONVERSATIONS = 30
OUTPUTS = 500
DATE = datetime.datetime(2026, 11, 29)

# Family -> templates of llama.cpp, by the names of their files.
TEMPLATES = {
    "gemma": ("google-gemma-4-31B-it", "google-gemma-4-31B-it-interleaved"),
    "kimi": ("moonshotai-Kimi-K2",),
    "minimax": ("MiniMax-M2",),
    "mistral": ("Mistral-Small-3.2-24B-Instruct-2506", "mistralai-Ministral-3-14B-Reasoning-2512"),
    "lfm": ("LFM2.5-8B-A1B",),
    "muse": ("muse-glimmer",),
    "hermes": ("Qwen-Qwen2.5-7B-Instruct", "Qwen-Qwen3-0.6B"),
    "qwen_coder": ("Qwen3-Coder", "Qwen3.5-4B"),
    "glm": ("GLM-4.6", "GLM-4.7-Flash"),
    "deepseek": ("deepseek-ai-DeepSeek-V3.1",),
    "harmony": ("openai-gpt-oss-120b",),
    "llama": ("meta-llama-Llama-3.1-8B-Instruct", "meta-llama-Llama-3.3-70B-Instruct"),
}
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}

PROPERTIES: dict[str, Any] = {
    "query": {"type": "string", "description": "what to look for"},
    "limit": {"type": "integer"},
    "score": {"type": "number"},
    "deep": {"type": "boolean"},
    "tags": {"type": "array", "items": {"type": "string"}},
    "where": {"type": "object", "properties": {"city": {"type": "string"}, "zip": {"type": "integer"}}},
}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Look something up.",
            "parameters": {"type": "object", "properties": PROPERTIES, "required": ["query"]},
        },
    },
    {
        "type": "function",
        "function": {
            "name": "now",
            "description": "Tell the time.",
            "parameters": {"type": "object", "properties": {}},
        },
    },
]
_WORDS = (
    "Paris",
    "the quick fox",
    "5 < 7",
    "naïve café",
    "漢字",
    "a, b: c",
    "(x)",
    "f(y)",
    "100 %",
    "line\nbreak",
    "x" * 30,
)
_ODD = (
    'say "hi"',
    "it's",
    "{brace}",
    "[1, 2]",
    "back\\slash",
    "tab\there",
    "<b>bold</b>",
    "42",
    "true",
    " padded ",
    "",
)

Arguments = dict[str, Any]
Calls = list[tuple[str, Arguments]]


def arguments_of(rng: random.Random, *, odd: bool) -> Arguments:
    """Arguments for `look_up`; odd ones have strings that look like something else."""
    words = _WORDS + (_ODD if odd else ())
    values: Arguments = {
        "query": rng.choice(words),
        "limit": rng.choice((0, 3, -12, 10**9)),
        "score": rng.choice((0.5, -2.25, 7)),
        "deep": rng.random() < 0.5,
        "tags": [rng.choice(words) for _ in range(rng.randint(0, 3))],
        "where": {"city": rng.choice(words), "zip": rng.randint(1, 99999)},
    }
    others = [name for name in values if name != "query"]
    chosen = {"query", *rng.sample(others, rng.randint(0, len(others)))}
    return {name: value for name, value in values.items() if name in chosen}


def calls_of(rng: random.Random, count: int, *, odd: bool) -> Calls:
    return [("now", {}) if rng.random() < 0.2 else ("look_up", arguments_of(rng, odd=odd)) for _ in range(count)]


# --- prompts ---------------------------------------------------------------------------------------------------------


def name_of(call: dict[str, Any]) -> str:
    return str(call["function"]["name"])


def conversation(rng: random.Random, number: int) -> dict[str, Any]:
    """Messages as templates expect them, in an order that every template takes."""
    messages: list[dict[str, Any]] = []
    if rng.random() < 0.6:
        messages.append({"role": "system", "content": rng.choice(("Be brief.", "You are a pirate.\nSay arr."))})
    made = 0
    for turn in range(rng.randint(1, 3)):
        messages.append({"role": "user", "content": f"{rng.choice(_WORDS)}? ({number}.{turn})"})
        for _ in range(rng.randint(0, 2)):
            calls: list[dict[str, Any]] = []
            for name, arguments in calls_of(rng, rng.choice((1, 1, 1, 1, 2)), odd=False):
                function = {"name": name, "arguments": arguments}
                calls.append({"id": f"call{made:05}", "type": "function", "function": function})
                made += 1
            answer: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": calls}
            if rng.random() < 0.4:
                answer["reasoning_content"] = f"I need {rng.choice(_WORDS)}."
            messages.append(answer)
            for call in calls:
                result = {"role": "tool", "tool_call_id": call["id"], "name": name_of(call)}
                messages.append({**result, "content": rng.choice(('{"ok": true}', "found it", "line\nline"))})
        messages.append({"role": "assistant", "content": f"Answer {number}.{turn}: {rng.choice(_WORDS)}"})
    if rng.random() < 0.5 and made:  # the last answer is still to come
        messages.pop()
    else:
        messages.append({"role": "user", "content": "and then?"})
    return {"messages": messages, "tools": made > 0 or rng.random() < 0.5}


def render(source: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str | None:
    """The prompt as transformers renders it; None if the template refuses the messages."""
    utils = importlib.import_module("transformers.utils.chat_template_utils")
    jinja2 = importlib.import_module("jinja2")
    vars(utils)["datetime"] = type("Fixed", (), {"now": staticmethod(lambda: DATE)})  # templates print the date
    try:
        rendered, _ = utils.render_jinja_template(
            [messages],
            tools=tools,
            chat_template=source,
            add_generation_prompt=True,
            **SPECIAL,
        )
    except (jinja2.TemplateError, TypeError, KeyError, AttributeError):
        return None
    return str(rendered[0])


def kimi_ids(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same conversation with the ids that Kimi K2 was trained with."""
    messages = json.loads(json.dumps(messages))
    ids: dict[str, str] = {}
    for message in messages:
        for call in message.get("tool_calls", ()):
            old = call["id"]
            call["id"] = ids[old] = f"functions.{call['function']['name']}:{len(ids)}"
        if "tool_call_id" in message:
            message["tool_call_id"] = ids[message["tool_call_id"]]
    return messages


def write_prompts(templates: Path, source: str) -> None:
    conversations = [conversation(random.Random(f"{SEED} {n}"), n) for n in range(CONVERSATIONS)]
    prompts: dict[str, dict[str, list[str | None]]] = {}
    for family, names in TEMPLATES.items():
        prompts[family] = {}
        for name in names:
            text = (templates / f"{name}.jinja").read_text("utf-8")
            prompts[family][name] = [
                render(
                    text,
                    kimi_ids(each["messages"]) if family == "kimi" else each["messages"],
                    TOOLS if each["tools"] else None,
                )
                for each in conversations
            ]
    data = {"source": source, "special": SPECIAL, "tools": TOOLS, "conversations": conversations, "prompts": prompts}
    write("prompts", data)


# --- outputs ---------------------------------------------------------------------------------------------------------


def bare(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def gemma(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{gemma(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(gemma, value)) + "]"
    return json.dumps(value)


def lfm(value: Any) -> str:
    if isinstance(value, str):
        return f"'{value}'"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else repr(value)


def write_calls(family: str, calls: Calls) -> str:
    """The calls as the family's template writes them."""
    texts = [json.dumps(arguments, ensure_ascii=False) for _, arguments in calls]
    names = [name for name, _ in calls]
    if family == "hermes":
        forms = (
            f'<tool_call>\n{{"name": "{n}", "arguments": {t}}}\n</tool_call>' for n, t in zip(names, texts, strict=True)
        )
        return "\n".join(forms)
    if family == "llama":
        return "; ".join(f'{{"name": "{n}", "parameters": {t}}}' for n, t in zip(names, texts, strict=True))
    if family == "mistral":
        return "".join(f"[TOOL_CALLS]{n}[ARGS]{t}" for n, t in zip(names, texts, strict=True))
    if family == "kimi":
        forms = (
            f"<|tool_call_begin|>functions.{n}:{i}<|tool_call_argument_begin|>{t}<|tool_call_end|>"
            for i, (n, t) in enumerate(zip(names, texts, strict=True))
        )
        return f"<|tool_calls_section_begin|>{''.join(forms)}<|tool_calls_section_end|>"
    if family == "deepseek":
        forms = (
            f"<｜tool▁call▁begin｜>{n}<｜tool▁sep｜>{t}<｜tool▁call▁end｜>" for n, t in zip(names, texts, strict=True)
        )
        return f"<｜tool▁calls▁begin｜>{''.join(forms)}<｜tool▁calls▁end｜>"
    if family == "gemma":
        return "".join(f"<|tool_call>call:{n}{gemma(a)}<tool_call|>" for n, a in calls)
    if family == "lfm":
        forms = (f"{n}({', '.join(f'{k}={lfm(v)}' for k, v in a.items())})" for n, a in calls)
        return f"<|tool_call_start|>[{', '.join(forms)}]<|tool_call_end|>"
    if family == "glm":
        pair = "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n"
        return "\n".join(
            f"<tool_call>{n}\n{''.join(pair.format(k, bare(v)) for k, v in a.items())}</tool_call>" for n, a in calls
        )
    if family == "qwen_coder":
        pair = "<parameter={}>\n{}\n</parameter>\n"
        return "\n".join(
            f"<tool_call>\n<function={n}>\n{''.join(pair.format(k, bare(v)) for k, v in a.items())}</function>\n</tool_call>"
            for n, a in calls
        )
    prefix = "atem:" if family == "muse" else ""
    forms = (
        f'<{prefix}invoke name="{n}">\n'
        + "".join(f'<{prefix}parameter name="{k}">{bare(v)}</{prefix}parameter>\n' for k, v in a.items())
        + f"</{prefix}invoke>"
        for n, a in calls
    )
    if family == "minimax":
        return "<minimax:tool_call>\n" + "\n".join(forms) + "\n</minimax:tool_call>"
    return "".join(
        f"{'<|start|>assistant' if i else ''} to={n}<|message|><atem:function_calls>\n{form}\n</atem:function_calls>"
        f"{'<|eom|>' if i < len(calls) - 1 else '<|eot|>'}"
        for i, (n, form) in enumerate(zip(names, forms, strict=True))
    )


# Family -> vLLM's parsers of calls and of reasoning, marks of reasoning ("" if the prompt has the first one), added tokens.
_THINK = ("<think>", "</think>")
PARSERS: dict[str, tuple[str, str | None, tuple[str, str] | None, tuple[str, ...]]] = {
    "gemma": (
        "gemma4",
        "gemma4",
        ("<|channel>thought\n", "<channel|>"),
        ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>', "<|turn>", "<|tool_response>"),
    ),
    "kimi": (
        "kimi_k2",
        "kimi_k2",
        _THINK,
        (
            *_THINK,
            *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
            *("<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        ),
    ),
    "minimax": ("minimax_m2", "minimax_m2", ("", "</think>"), (*_THINK, "<minimax:tool_call>", "</minimax:tool_call>")),
    "mistral": (
        "mistral",
        "mistral",
        ("[THINK]", "[/THINK]"),
        ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"),
    ),
    "lfm": ("lfm2", None, None, ("<|tool_call_start|>", "<|tool_call_end|>")),
    "muse": (
        "muse_glimmer",
        "muse_glimmer",
        (" to=self<|message|>", "<|eom|><|start|>assistant"),
        ("<|start|>", "<|message|>", "<|eom|>", "<|eot|>"),
    ),
    "hermes": ("hermes", "qwen3", ("", "</think>\n\n"), (*_THINK, "<tool_call>", "</tool_call>")),
    "qwen_coder": ("qwen3_coder", "qwen3", ("", "</think>\n\n"), (*_THINK, "<tool_call>", "</tool_call>")),
    "glm": ("glm47", "glm47", ("", "</think>"), (*_THINK, "<tool_call>", "</tool_call>")),
    "deepseek": (
        "deepseek_v31",
        "deepseek_v3",
        ("", "</think>"),
        (
            *_THINK,
            *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
            "<｜tool▁sep｜>",
        ),
    ),
    "llama": ("llama3_json", None, None, ("<|python_tag|>", "<|eom_id|>", "<|eot_id|>")),
}


def output(rng: random.Random, family: str, *, odd: bool) -> tuple[str, bool]:
    """A reply as the family's template writes it, and whether it has reasoning."""
    marks = PARSERS[family][2]
    reasons = marks is not None and (family == "minimax" or rng.random() < 0.5)  # MiniMax's prompt always opens it
    calls = calls_of(rng, rng.choice((0, 1, 1, 2, 3)), odd=odd)
    text = rng.choice(("", "Let me see.", "Well,\n\nthis is it.")) if calls else f"It is {rng.choice(_WORDS)}."
    written = write_calls(family, calls) if calls else ""
    if family == "llama" and calls:
        text = ""
    if family == "muse":
        said = f" to=user<|message|>{text}<|e{'om' if calls else 'ot'}|>" if text else ""
        written = f"<|start|>assistant{written}" if said and calls else written
        text = said
    thought = f"{marks[0]}I think of {rng.choice(_WORDS)}.{marks[1]}" if marks is not None and reasons else ""
    return f"{thought}{text}{written}", reasons


def mutated(rng: random.Random, family: str, text: str) -> str:
    """The reply with one thing wrong."""
    marks = [
        mark
        for mark in (*PARSERS[family][3], "{", "}", '"', "'", "(", ")", "</", "<", ">", "=", ":", ",")
        if mark in text
    ]
    kind = rng.randrange(6)
    if kind == 0:
        return text[: rng.randint(0, len(text))]
    if kind == 1:
        return text + rng.choice((" Done.", "\n\nIs that all?", "\n"))
    if not marks:
        return text + text
    mark = rng.choice(marks)
    places = [at for at in range(len(text)) if text.startswith(mark, at)]
    at = rng.choice(places)
    if kind == 2:
        return text[:at] + text[at + len(mark) :]
    if kind == 3:
        return text[:at] + mark + text[at:]
    if kind == 4:
        return text[:at] + rng.choice(("\n", "  ", "hm ")) + text[at:]
    return text[: at + len(mark)] + rng.choice(("\n", "  ")) + text[at + len(mark) :]


def reader(family: str) -> Callable[[str, bool], dict[str, Any]]:
    """vLLM's parsers of the family, as a function of a reply and of whether it has reasoning."""
    chat = importlib.import_module("vllm.entrypoints.openai.chat_completion.protocol")
    manager = importlib.import_module("vllm.parser.parser_manager").ParserManager
    importlib.import_module("vllm.tool_parsers"), importlib.import_module("vllm.reasoning")
    tokenizers = importlib.import_module("tokenizers")
    transformers = importlib.import_module("transformers")
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        [], tokenizers.trainers.BpeTrainer(vocab_size=256, initial_alphabet=alphabet, show_progress=False)
    )
    calls, reasoning, _, added = PARSERS[family]
    backend.add_special_tokens([tokenizers.AddedToken(mark, special=True, normalized=False) for mark in added])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend)
    parser_class = manager.get_parser(tool_parser_name=calls, reasoning_parser_name=reasoning, enable_auto_tools=True)
    request = chat.ChatCompletionRequest(messages=[{"role": "user", "content": "q"}], tools=TOOLS, model="m")

    def read(text: str, reasons: bool) -> dict[str, Any]:
        kwargs = {"chat_template_kwargs": {"thinking": reasons, "enable_thinking": reasons}} if reasoning else {}
        parser = parser_class(tokenizer, request.tools, **kwargs)
        ids = backend.encode(text, add_special_tokens=False).ids
        thought, content, found = parser.parse(text, request, enable_auto_tools=True, model_output_token_ids=ids)
        return {
            "reasoning": thought or "",
            "content": content or "",
            "calls": [[call.name, call.arguments] for call in found or ()],
        }

    return read


def write_outputs() -> None:
    version = importlib.import_module("vllm._version")
    families: dict[str, Any] = {}
    for family in PARSERS:
        read, rng, cases = reader(family), random.Random(f"{SEED} {family}"), []
        for number in range(OUTPUTS):
            how = "template" if number < OUTPUTS // 4 else "grammar" if number < OUTPUTS // 2 else "mutation"
            text, reasons = output(rng, family, odd=how != "template")
            if how == "mutation":
                text = mutated(rng, family, text)
            cases.append({"how": how, "text": text, "reasons": reasons, **read(text, reasons)})
        families[family] = cases
        print(f"{family}: {len(cases)} outputs")
    number, commit = version.__version__, version.__commit_id__  # builds for CPUs do not name their commit
    source = f"vllm-project/vllm {number}, {f'commit {commit}' if commit else f'tag v{number}'}"
    parsers = {family: {"calls": calls, "reasoning": reasoning} for family, (calls, reasoning, _, _) in PARSERS.items()}
    write("outputs", {"source": source, "parsers": parsers, "tools": TOOLS, "families": families})


def write(name: str, data: dict[str, Any]) -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    file = FOLDER / f"{name}.json.xz"
    file.write_bytes(lzma.compress(json.dumps(data, ensure_ascii=False, indent=0).encode(), preset=9))
    print(f"{file}: {file.stat().st_size:,} bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    prompts = commands.add_parser("prompts")
    prompts.add_argument("templates", type=Path)
    prompts.add_argument("--source", default="ggml-org/llama.cpp", help="repository and commit of the templates")
    commands.add_parser("outputs")
    args = parser.parse_args()
    if args.command == "prompts":
        write_prompts(args.templates, args.source)
    else:
        write_outputs()


if __name__ == "__main__":
    main()
