"""Names in the published README and site (paths, commands, imports) are here, or `docs/migration.md` says what is instead."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path

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
