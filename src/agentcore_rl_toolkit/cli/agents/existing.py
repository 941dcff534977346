"""An agent that exists already: what its source shows, and a scorer with its test and data beside it."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ...errors import ConfigError
from ...isolation.project import Project

# Packages, most telling first, and what they are called.
_FRAMEWORKS = {
    "strands": "Strands",
    "langgraph": "LangGraph",
    "agents": "OpenAI's Agents SDK",
    "google.adk": "Google ADK",
    "pydantic_ai": "pydantic-ai",
    "autogen_agentchat": "AutoGen",
    "crewai": "CrewAI",
    "langchain": "LangChain",
    "anthropic": "Anthropic's client",
    "openai": "OpenAI's client",
    "boto3": "boto3",
}
_APPS = ("BedrockAgentCoreApp", "AgentCoreRLApp", "FastAPI", "Starlette")
_CLIENTS = (
    "OpenAI",
    "AsyncOpenAI",
    "Anthropic",
    "AsyncAnthropic",
    "AnthropicBedrock",
    "AsyncAnthropicBedrock",
    "LiteLlm",
)
_NO_MODELS = ("BaseModel", "RootModel")

_SCORE = '''"""The score of the agent in {agent}. It runs beside the trainer: the agent sees neither it nor the reference."""

from agentcore_rl_toolkit import answer_text


def score(payload, answer, reference, trajectory):
    """1 if the answer has the reference in it, else 0. Make it yours."""
    return float(str(reference).casefold() in answer_text(answer).casefold())
'''
_TEST = '''"""The scorer tells right answers from wrong ones: a wrong score silently trains the wrong thing."""

from score import score


def test_a_right_answer_scores():
    assert score({{}}, "The answer is 42.", "42", []) == 1.0


def test_a_wrong_or_empty_answer_does_not():
    assert score({{}}, "The answer is 41.", "42", []) == 0.0
    assert score({{}}, "", "42", []) == 0.0
'''


@dataclass(frozen=True, kw_only=True)
class Found:
    """What the source of an agent shows."""

    app: str | None
    entrypoint: str | None
    streams: bool
    framework: str | None
    models: tuple[str, ...]
    keys: tuple[str, ...]

    def __str__(self) -> str:
        how = "that streams" if self.streams else ""
        entry = " ".join(filter(None, (self.entrypoint and f"`{self.entrypoint}`", self.app and f"of {self.app}", how)))
        shown = {
            "entrypoint": entry,
            "framework": self.framework or "",
            "model": ", ".join(self.models),
            "payload": ", ".join(self.keys),
        }
        return "\n".join(f"  {name:<11}{text or 'not found'}" for name, text in shown.items())


def inspect_agent(file: Path) -> Found:
    """Read an agent's file and the modules of its project. Nothing is run. Raises: ConfigError if the file cannot be read."""
    trees = [_tree(file)]
    for path in sorted(Project.of(file).folder.rglob("*.py")):
        if path != file and not {"site-packages", "node_modules"} & {*path.parts} and not path.name.startswith("test_"):
            try:
                trees.append(_tree(path))
            except ConfigError:  # of another Python
                continue
    imported = {name for tree in trees for name in _imports(tree)}
    called = [name for tree in trees for name in _calls(tree)]
    functions = (f for f in ast.walk(trees[0]) if isinstance(f, (ast.FunctionDef, ast.AsyncFunctionDef)))
    entry = next(filter(_is_entrypoint, functions), None)
    models = [
        n for n in called if n in _CLIENTS or (n.endswith("Model") and n not in _NO_MODELS) or n.startswith("Chat")
    ]
    return Found(
        app=next((name for name in _APPS if name in called), None),
        entrypoint=None if entry is None else entry.name,
        streams=entry is not None and any(isinstance(n, (ast.Yield, ast.YieldFrom)) for n in ast.walk(entry)),
        framework=next((shown for name, shown in _FRAMEWORKS.items() if _is_used(name, imported)), None),
        models=tuple(dict.fromkeys(models)),
        keys=() if entry is None else tuple(dict.fromkeys(_keys(trees[0], entry))),
    )


def write_scorer(file: Path, found: Found) -> list[Path]:
    """Write a scorer, its test and two rows beside an agent. Raises: ConfigError if one of them is there already."""
    row = dict.fromkeys(found.keys or ("prompt",), "...")
    rows = "".join(json.dumps({**row, "_reference": f"the answer to row {n}"}) + "\n" for n in (1, 2))
    texts = {"score.py": _SCORE.format(agent=file.name), "test_score.py": _TEST.format(), "rows.jsonl": rows}
    there = [name for name in texts if (file.parent / name).exists()]
    if there:
        raise ConfigError(
            f"{', '.join(there)} in {file.parent}: already there; move them, or write your scorer by hand"
        )
    for name, text in texts.items():
        (file.parent / name).write_text(text)
    return [file.parent / name for name in texts]


def _is_used(package: str, imported: set[str]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for name in imported)


def _tree(file: Path) -> ast.Module:
    try:
        return ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError) as e:
        raise ConfigError(f"{file} cannot be read: {e}") from e


def _imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _calls(tree: ast.Module) -> Iterator[str]:
    """The names of what is called, and `bedrock-runtime` for such a client of boto3."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            service = next((a.value for a in node.args if isinstance(a, ast.Constant)), None)
            yield "ChatClient of bedrock-runtime" if name == "client" and service == "bedrock-runtime" else name


def _is_entrypoint(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    for mark in node.decorator_list:
        call = mark if isinstance(mark, ast.Call) else None
        of = call.func if call is not None else mark
        name = of.attr if isinstance(of, ast.Attribute) else getattr(of, "id", "")
        path = call.args[0] if call is not None and call.args else None
        if name in ("entrypoint", "rollout_entrypoint"):
            return True
        if name == "post" and isinstance(path, ast.Constant) and path.value == "/invocations":
            return True
    return False


def _keys(tree: ast.Module, entry: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    """The keys that are read of variables with the name of the entrypoint's payload."""
    payload = entry.args.args[0].arg if entry.args.args else "payload"
    for node in ast.walk(tree):
        of, key = None, None
        if isinstance(node, ast.Subscript):
            of, key = node.value, node.slice
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get":
            of, key = node.func.value, node.args[0] if node.args else None
        if (
            isinstance(of, ast.Name)
            and of.id == payload
            and isinstance(key, ast.Constant)
            and isinstance(key.value, str)
        ):
            yield key.value
