"""Small models' worth of tokenizer and template, one per family; the templates write the families' own markers."""

from __future__ import annotations

import fcntl
import functools
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from agentcore_rl_toolkit.messages.render import Renderer

ROOT = Path(__file__).parents[3]
ARCHIVE = "llama-cpp-python==0.3.36"  # has llama.cpp's collection of chat templates
ARCHIVE_S = 240.0  # 77 MB
TEMPLATES = Path(__file__).parent / "templates"

_CORPUS = [
    "The quick brown fox jumps over the lazy dog. It is what it is, and then some more of the same text again.",
    '{"name": "look_up", "arguments": {"query": "value", "limit": 3, "deep": true}}',
    "system user assistant tool function parameters answer question number hello world thinking because therefore",
    "def f(x):\n    return x ** 2\n\n# a comment\nfor i in range(10):\n    print(i)\n",
    "1234567890 3.14159 2 + 2 = 4",
]


@dataclass(frozen=True, kw_only=True)
class Family:
    """A template, the special tokens it needs, what ends an answer, and the parser that its text must suggest."""

    name: str
    special: tuple[str, ...]
    eos: tuple[str, ...]
    parser: str
    plain_added: tuple[str, ...] = ()
    bos: str | None = None


_CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_THINK = ("<think>", "</think>", "<tool_call>", "</tool_call>")
_LLAMA = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>")
_DEEPSEEK = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>")
_DEEPSEEK_TOOLS = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁outputs▁begin｜>",
    "<｜tool▁outputs▁end｜>",
    "<｜tool▁output▁begin｜>",
    "<｜tool▁output▁end｜>",
)
_GLM = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>")
_HARMONY = (
    "<|start|>",
    "<|end|>",
    "<|message|>",
    "<|channel|>",
    "<|constrain|>",
    "<|return|>",
    "<|call|>",
    "<|endoftext|>",
)

_GEMMA = ("<bos>", "<|turn>", "<turn|>", "<|think|>", "<|channel>", "<channel|>", "<|tool>", "<tool|>")
_KIMI = ("[EOS]", "<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|im_end|>")
_KIMI_TOOLS = (
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)
_MISTRAL = (
    *(f"[{slash}{name}]" for name in ("SYSTEM_PROMPT", "AVAILABLE_TOOLS", "INST", "THINK") for slash in ("", "/")),
    *("<s>", "</s>", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "[TOOL_RESULTS]", "[TOOL_CONTENT]", "[/TOOL_RESULTS]"),
)

FAMILIES = {
    family.name: family
    for family in (
        Family(name="hermes", special=_CHATML, eos=("<|im_end|>",), parser="hermes"),
        Family(
            name="qwen3",
            special=_CHATML,
            eos=("<|im_end|>", "<|endoftext|>"),
            parser="hermes",
            plain_added=_THINK,
        ),
        Family(name="qwen_coder", special=_CHATML, eos=("<|im_end|>",), parser="qwen_coder", plain_added=_THINK),
        Family(
            name="llama3",
            special=_LLAMA,
            eos=("<|eot_id|>", "<|eom_id|>"),
            parser="llama",
            bos="<|begin_of_text|>",
        ),
        Family(name="pythonic", special=_LLAMA, eos=("<|eot_id|>",), parser="llama", bos="<|begin_of_text|>"),
        Family(
            name="glm",
            special=_GLM,
            eos=("<|endoftext|>", "<|user|>", "<|observation|>"),
            parser="glm",
            plain_added=_THINK,
        ),
        Family(name="harmony", special=_HARMONY, eos=("<|return|>", "<|call|>", "<|endoftext|>"), parser="harmony"),
        Family(
            name="deepseek_v3",
            special=_DEEPSEEK,
            eos=("<｜end▁of▁sentence｜>",),
            parser="deepseek",
            plain_added=_DEEPSEEK_TOOLS,
            bos="<｜begin▁of▁sentence｜>",
        ),
        Family(
            name="deepseek_r1",
            special=_DEEPSEEK,
            eos=("<｜end▁of▁sentence｜>",),
            parser="deepseek",
            plain_added=(*_DEEPSEEK_TOOLS, "<think>", "</think>"),
            bos="<｜begin▁of▁sentence｜>",
        ),
        Family(
            name="gemma",
            special=(*_GEMMA, "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>'),
            eos=("<turn|>", "<|tool_response>"),
            parser="gemma",
            bos="<bos>",
        ),
        Family(
            name="kimi",
            special=_KIMI,
            eos=("<|im_end|>",),
            parser="kimi",
            plain_added=(*_KIMI_TOOLS, "<think>", "</think>"),
        ),
        Family(
            name="minimax",
            special=("]~!b[", "]~b]", "[e~["),
            eos=("[e~[",),
            parser="minimax",
            plain_added=("<think>", "</think>", "<minimax:tool_call>", "</minimax:tool_call>"),
        ),
        Family(name="mistral", special=_MISTRAL, eos=("</s>",), parser="mistral", bos="<s>"),
        Family(
            name="lfm",
            special=(*_CHATML, "<|startoftext|>", "<|tool_call_start|>", "<|tool_call_end|>"),
            eos=("<|im_end|>",),
            parser="lfm",
            plain_added=("<think>", "</think>"),
            bos="<|startoftext|>",
        ),
        Family(
            name="muse",
            special=("<|begin_of_text|>", "<|start|>", "<|message|>", "<|eom|>", "<|eot|>"),
            eos=("<|eot|>",),
            parser="muse",
            bos="<|begin_of_text|>",
        ),
        Family(name="counting", special=_CHATML, eos=("<|im_end|>",), parser="plain"),
        Family(name="markless", special=("<|endoftext|>",), eos=("<|endoftext|>",), parser="plain"),
    )
}
WITH_TOOLS = [name for name in FAMILIES if name not in ("counting", "markless")]


def build_tokenizer(family: Family) -> Tokenizer:
    """A byte-level BPE of some 400 tokens, trained on a few lines, with the family's markers added."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in family.special])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in family.plain_added])
    return tokenizer


def write_model(family: Family, folder: Path) -> Path:
    """A model directory as a hub has it, without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer(family)
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {"eos_token": {"content": family.eos[0], "special": True}}
    if family.bos:
        config["bos_token"] = family.bos
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    ids = [tokenizer.token_to_id(token) for token in family.eos]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    (folder / "chat_template.jinja").write_text((TEMPLATES / f"{family.name}.jinja").read_text("utf-8"), "utf-8")
    return folder


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``model_dir("qwen3")`` -> a directory to load from."""
    root = tmp_path_factory.mktemp("models")

    @functools.cache
    def make(name: str) -> Path:
        return write_model(FAMILIES[name], root / name)

    return make


@pytest.fixture(scope="session")
def renderer_for(model_dir: Callable[[str], Path]) -> Callable[[str], Renderer]:
    """``renderer_for("qwen3")`` -> its renderer; shared, renderers have no state."""

    @functools.cache
    def load(name: str) -> Renderer:
        return Renderer.from_path(model_dir(name))

    return load


@pytest.fixture(params=WITH_TOOLS)
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


@pytest.fixture
def renderer(family: Family, renderer_for: Callable[[str], Renderer]) -> Renderer:
    return renderer_for(family.name)


@pytest.fixture(scope="session")
def tools() -> list[dict[str, Any]]:
    properties = {
        "query": {"type": "string"},
        "limit": {"type": "integer"},
        "deep": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string"}},
    }
    function = {
        "name": "look_up",
        "description": "Look something up.",
        "parameters": {"type": "object", "properties": properties, "required": ["query"]},
    }
    return [{"type": "function", "function": function}]


@pytest.fixture(scope="session")
def in_archive() -> Path:
    """The templates of the source archive. It is fetched once, and nothing of it is built."""
    home = ROOT / ".venvs" / "llama-cpp-templates"
    home.mkdir(parents=True, exist_ok=True)
    with open(home.parent / f"{home.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        ready = home / "ready"
        if not ready.exists() or ready.read_text() != ARCHIVE:
            if os.environ.get("AGENTCORE_RL_NO_INSTALL"):
                pytest.skip("AGENTCORE_RL_NO_INSTALL is set")
            pip = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
            pip += ["--no-binary", "llama-cpp-python", "-d", str(home), ARCHIVE]
            try:
                done = subprocess.run(pip, capture_output=True, text=True, timeout=ARCHIVE_S)
            except subprocess.TimeoutExpired:
                pytest.skip(f"{ARCHIVE} did not come within {ARCHIVE_S:g} s")
            if done.returncode != 0:
                pytest.skip(f"{ARCHIVE} cannot be had: {done.stderr[-400:]}")
            [archive] = home.glob("*.tar.gz")
            with tarfile.open(archive) as members:
                for member in members:
                    file = members.extractfile(member) if "/models/templates/" in member.name else None
                    if file is not None and member.name.endswith(".jinja"):
                        (home / Path(member.name).name).write_bytes(file.read())
            archive.unlink()
            ready.write_text(ARCHIVE)
    return home
