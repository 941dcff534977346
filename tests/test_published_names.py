"""Names in the published README and site (paths, commands, imports) are here, or `docs/migration.md` says what is instead."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import json
import sys
from pathlib import Path

import pytest

from agentcore_rl_toolkit.client.testing import ARN, TEST_CREDENTIALS, ScriptedRuntime

ROOT = Path(__file__).parents[1]
PATHS = (
    *("CONTRIBUTING.md", ".env.example", "scripts/build_docker_image_and_push_to_ecr.sh"),
    *(f"examples/strands_{name}_agent/README.md" for name in ("math", "appworld", "migration", "officebench")),
    *("examples/strands_math_agent/basic_app.py", "examples/strands_math_agent/rl_app.py"),
    *("examples/strands_migration_agent/evaluate.py", "examples/strands_migration_agent/evaluate_async.py"),
)
COMMANDS = ("agentcore_rl_toolkit.backends.verl.main",)  # after `python -m`
IMPORTS = (
    ("agentcore_rl_toolkit", "AgentCoreRLApp"),
    ("agentcore_rl_toolkit", "RewardFunction"),
    ("agentcore_rl_toolkit", "RolloutClient"),
    ("agentcore_rl_toolkit", "RolloutFuture"),
    ("agentcore_rl_toolkit.backends.slime", "SlimeRunner"),
)
ELSEWHERE = (  # what is named there and not here under its name
    "agentcore_rl_toolkit.sandbox",
    "agentcore_rl_toolkit.frameworks.strands.vllm_model",
    "examples/sandbox_quickstart",
    "examples/agentcore_math/train_agentcore_math_tinker.sh",
    "examples/agentcore_math/train_agentcore_math_verl.sh",
    "src/agentcore_rl_toolkit/backends/slime/scripts/install_slime.sh",
    "src/agentcore_rl_toolkit/backends/verl/config/agentcore_grpo.yaml",
    "src/agentcore_rl_toolkit/backends/verl/examples/math_agent",
    "src/agentcore_rl_toolkit/backends/verl/examples/officebench_agent",
    "src/agentcore_rl_toolkit/backends/verl/scripts/install_megatron.sh",
)


def test_every_name_of_the_published_documentation_is_here_or_said_to_be_elsewhere() -> None:
    assert [path for path in PATHS if not (ROOT / path).exists()] == []
    assert [name for name in COMMANDS if importlib.util.find_spec(name) is None] == []
    assert [(m, name) for m, name in IMPORTS if not hasattr(importlib.import_module(m), name)] == []
    page = (ROOT / "docs/migration.md").read_text()
    assert [name for name in ELSEWHERE if f"`{name}`" not in page] == []


@pytest.mark.parametrize("script", ["evaluate", "evaluate_async"])
def test_the_migration_agent_is_evaluated_into_a_table_and_every_result_is_kept(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples/strands_migration_agent"))
    for name in ("evaluate", "evaluate_async"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    for name, value in TEST_CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    module = importlib.import_module(script)
    assert (
        len(module.rows_of(module.options(["--agent", ARN, "--bucket", "b", "--base-url", "u", "--model-id", "m"])))
        == 8
    )
    scripts = {"a": {"result": {"rewards": 1.0}}, "b": {"result": {"rewards": 0.5}}, "c": {"fail": "no Maven here"}}
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"id": name, "script": script}) + "\n" for name, script in scripts.items()))
    with ScriptedRuntime() as runtime:
        words = ["--agent", ARN, "--bucket", f"file://{tmp_path}/store", "--endpoint-url", runtime.url, "--exp-id", "m"]
        words += [
            "--base-url",
            "http://model/v1",
            "--model-id",
            "m",
            "--max-turns",
            "7",
            "--out",
            str(tmp_path / "runs"),
        ]
        monkeypatch.setattr(sys, "argv", ["evaluate.py", *words, "--data", str(data), "--timeout", "60"])
        if script == "evaluate":
            module.main()
        else:
            asyncio.run(module.main())
    said = capsys.readouterr().out
    rows = [line.split() for line in said.splitlines()]
    assert [row[:4] for row in rows[1:3]] == [["a", "1", "1", "1.00"], ["b", "1", "0", "0.50"]]
    assert rows[3][:4] == ["c", "1", "0", "-"]
    assert "no Maven here" in said
    results = [json.loads(line) for line in (tmp_path / "runs/m/results.jsonl").read_text().splitlines()]
    assert [result["reward"] for result in results] == [1.0, 0.5, None]
    assert results[0]["record"]["payload"]["max_turns"] == 7
