"""An agent that exists already: what its source shows, and a scorer with its test and data next to it."""

from __future__ import annotations

import ast
import contextlib
import json
import re
from collections.abc import Sequence
from pathlib import Path

from ...errors import ConfigError
from ...isolation.project import Project

# Packages, most telling first. OpenAI's Agents SDK is `agents`.
_FRAMEWORKS = (
    "strands langgraph agents google.adk pydantic_ai autogen_agentchat crewai langchain anthropic openai boto3"
)
_IMPORT = r"^\s*(?:import (?:.*, )?|from )%s\b"
# Calls of classes that are a model or its client, but not pydantic's own, and of boto3's client.
_MODEL = re.compile(
    r"(?<!class )(?<!def )\b((?!Base|Root)\w*Model|Chat\w+|(?:Async)?(?:OpenAI|Anthropic(?:Bedrock)?)|LiteLlm)\("
    r"|\bclient\('(bedrock-runtime)'"
)
_ENTRYPOINT = re.compile(r"([\w.]+\.)?(rollout_)?entrypoint\b|[\w.]+\.post\('/invocations'")

_SCORE = '''"""The score of the agent in {agent}. The trainer runs it. The agent sees neither this file nor the reference."""

from agentcore_rl_toolkit import answer_text


def score(payload, answer, reference, trajectory):
    """Return 1 if the answer contains the reference, and 0 otherwise. Replace this with your own score."""
    return float(str(reference).casefold() in answer_text(answer).casefold())
'''
_TEST = '''"""The scorer tells right answers from wrong ones: a wrong score trains the wrong behavior without an error."""

from %sscore import score


def test_a_right_answer_scores_and_a_wrong_or_empty_one_does_not():
    assert score({}, "The answer is 42.", "42", []) == 1.0
    assert score({}, "The answer is 41.", "42", []) == 0.0
    assert score({}, "", "42", []) == 0.0
'''


def inspect_agent(file: Path) -> dict[str, list[str]]:
    """Return the entrypoint, framework, models and payload keys that an agent's file and the modules of its project show.

    Nothing is run. Raises: ConfigError if the file cannot be read.
    """
    sources = [_source(file)]
    tree = ast.parse(sources[0])
    for path in sorted(Project.of(file).folder.rglob("*.py")):
        if path != file and not {"site-packages", "node_modules"} & {*path.parts} and not path.name.startswith("test_"):
            with contextlib.suppress(ConfigError):  # a file for another Python
                sources.append(_source(path))
    text = "\n".join(sources)
    functions = (f for f in ast.walk(tree) if isinstance(f, (ast.FunctionDef, ast.AsyncFunctionDef)))
    entry = next((f for f in functions if any(_ENTRYPOINT.match(ast.unparse(d)) for d in f.decorator_list)), None)
    frameworks = [n for n in _FRAMEWORKS.split() if re.search(_IMPORT % n.replace(".", r"(?:\.| import )"), text, re.M)]
    models = [name or f"client of {service}" for name, service in _MODEL.findall(text)]
    payload = entry.args.args[0].arg if entry is not None and entry.args.args else "payload"
    keys = re.findall(rf"(?<![\w.]){payload}(?:\.get\(|\[)'([^']+)'", sources[0])
    return {
        "entrypoint": [entry.name] if entry is not None else [],
        "framework": frameworks[:1],
        "model": [*dict.fromkeys(models)],
        "payload": [*dict.fromkeys(keys)],
    }


def write_scorer(file: Path, keys: Sequence[str]) -> list[Path]:
    """Write a scorer, its test and two rows next to an agent. Raises: ConfigError if one of these files exists."""
    row = dict.fromkeys(keys or ("prompt",), "...")
    rows = "".join(json.dumps({**row, "_reference": f"the answer to row {n}"}) + "\n" for n in (1, 2))
    dot = "." if (file.parent / "__init__.py").exists() else ""  # pytest imports the test as a part of the package
    texts = {"score.py": _SCORE.format(agent=file.name), "test_score.py": _TEST % dot, "rows.jsonl": rows}
    if there := [name for name in texts if (file.parent / name).exists()]:
        raise ConfigError(f"{', '.join(there)} in {file.parent}: already there; move them")
    for name, text in texts.items():
        (file.parent / name).write_text(text)
    return [file.parent / name for name in texts]


def _source(file: Path) -> str:
    """Return a file's source in one form: single quotes, no comments."""
    try:
        return ast.unparse(ast.parse(file.read_bytes()))
    except (OSError, SyntaxError, ValueError, RecursionError) as e:
        raise ConfigError(f"{file} cannot be read: {e}") from e
