"""The commands, variables and files that start each coding agent without a terminal. Both apps use them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
from dataclasses import dataclass, field
from pathlib import Path

# In the clone, `make packages` installs the programs here; an image has them on PATH.
INSTALLED = Path(__file__).resolve().parent.parent.parent / ".venvs" / "npm" / "node_modules" / ".bin"
SHOWN = 4000  # bytes of a program's output that are kept


# Messages of the programs and of the gateway if the policy used up its turns or its context.
RAN_OUT = {
    "all are used": "turns",
    "prompt is too long": "context",
    "out of room in the model's context window": "context",  # Codex
    "maximum context length": "context",
}


class ProgramError(RuntimeError):
    """A program ended with another code than 0."""

    @property
    def ran_out_of(self) -> str | None:
        """Return "turns" or "context" if the program ended because the policy used them up."""
        text = str(self).lower()
        return next((what for words, what in RAN_OUT.items() if words in text), None)


@dataclass(frozen=True, kw_only=True)
class Connection:
    """A model's address, ending in /v1, as `payload["_rollout"]` has it."""

    base_url: str
    api_key: str
    model_id: str


@dataclass(frozen=True, kw_only=True)
class Program:
    """A command with its variables and the files of its home. {task}, {url} (without /v1), {key} and {model} are filled in."""

    command: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)


CODEX = """model = "{model}"
model_provider = "gateway"
[model_providers.gateway]
name = "gateway"
base_url = "{url}/v1"
env_key = "GATEWAY_KEY"
wire_api = "responses"
"""
OPENCODE = {
    "provider": {
        "gateway": {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": "{url}/v1", "apiKey": "{key}"},
            "models": {"{model}": {"name": "{model}"}},
        }
    }
}
PI = {
    "providers": {
        "gateway": {
            "baseUrl": "{url}/v1",
            "api": "openai-completions",
            "apiKey": "{key}",
            "models": [{"id": "{model}"}],
        }
    }
}
CLAUDE = ("claude", "-p", "{task}", "--model", "{model}", "--dangerously-skip-permissions")
PROGRAMS = {
    "claude": Program(
        command=CLAUDE,
        env={
            "ANTHROPIC_BASE_URL": "{url}",
            "ANTHROPIC_API_KEY": "{key}",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "IS_SANDBOX": "1",  # it runs as root, too
        },
    ),
    "claude-bedrock": Program(  # as it calls Amazon Bedrock
        command=CLAUDE,
        env={
            "CLAUDE_CODE_USE_BEDROCK": "1",
            "ANTHROPIC_BEDROCK_BASE_URL": "{url}/bedrock",
            "AWS_BEARER_TOKEN_BEDROCK": "{key}",
            "AWS_REGION": "us-west-2",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "IS_SANDBOX": "1",
        },
    ),
    "codex": Program(
        command=("codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "{task}"),
        env={"GATEWAY_KEY": "{key}"},
        files={".codex/config.toml": CODEX},
    ),
    "opencode": Program(
        command=("opencode", "run", "--model", "gateway/{model}", "{task}"),
        files={".config/opencode/opencode.json": json.dumps(OPENCODE)},
    ),
    "qwen": Program(
        command=("qwen", "--yolo", "--auth-type", "openai", "--model", "{model}", "-p", "{task}"),
        env={"OPENAI_BASE_URL": "{url}/v1", "OPENAI_API_KEY": "{key}"},
    ),
    "gemini": Program(
        command=("gemini", "--yolo", "--model", "{model}", "-p", "{task}"),
        env={
            "GOOGLE_GEMINI_BASE_URL": "{url}",
            "GEMINI_API_KEY": "{key}",
            "GEMINI_CLI_TRUST_WORKSPACE": "true",
        },
        files={".gemini/settings.json": json.dumps({"security": {"auth": {"selectedType": "gemini-api-key"}}})},
    ),
    "pi": Program(
        command=("pi", "-p", "--provider", "gateway", "--model", "{model}", "{task}"),
        env={"PI_OFFLINE": "1"},
        files={".pi/agent/models.json": json.dumps(PI)},
    ),
}


async def run_program(name: str, task: str, workspace: Path, home: Path, model: Connection, limit_s: float) -> str:
    """Run a program in ``workspace`` with a new home folder, and return the end of its output, also after a timeout.

    Raises: FileNotFoundError when the program is not installed, ProgramError when it ends with another code than 0.
    """
    program = PROGRAMS[name]
    words = {
        "task": task,
        "url": model.base_url.removesuffix("/v1"),
        "key": model.api_key,
        "model": model.model_id,
    }

    def filled(text: str) -> str:
        return re.sub(r"\{(task|url|key|model)\}", lambda found: words[found[1]], text)

    for path, text in program.files.items():
        (home / path).parent.mkdir(parents=True, exist_ok=True)
        (home / path).write_text(filled(text))
    search = f"{os.environ['PATH']}{os.pathsep}{INSTALLED}"
    found = shutil.which(program.command[0], path=search)
    if found is None:
        raise FileNotFoundError(f"{program.command[0]} is not installed: see the README of this example")
    env = {variable: filled(value) for variable, value in program.env.items()}
    env |= {"HOME": str(home), "PATH": search, "TMPDIR": str(home), "NO_COLOR": "1", "TERM": "dumb"}
    with (home / "output").open("w+b") as output:
        process = await asyncio.create_subprocess_exec(
            found,
            *map(filled, program.command[1:]),
            cwd=workspace,
            env=env,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            code = await asyncio.wait_for(process.wait(), limit_s)
        except TimeoutError:
            code = 0  # the reward scores what it did until then
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its servers and background commands end with it
        await process.wait()
        output.seek(max(0, output.seek(0, os.SEEK_END) - SHOWN))
        text = output.read().decode("utf-8", "replace")
    if code != 0:
        raise ProgramError(f"{name} ended with code {code}:\n{text}")
    return text
