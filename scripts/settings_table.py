"""Write docs/settings.md: the settings of all trainers side by side.

python scripts/settings_table.py           # prints the page
python scripts/settings_table.py --write   # replaces it
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from agentcore_rl_toolkit.backends.rllm import RllmConfig
from agentcore_rl_toolkit.backends.sagemaker.settings import SageMakerConfig
from agentcore_rl_toolkit.backends.settings import Settings
from agentcore_rl_toolkit.backends.slime import SlimeRunner
from agentcore_rl_toolkit.backends.tinker.settings import TinkerConfig
from agentcore_rl_toolkit.backends.trl import TrlConfig
from agentcore_rl_toolkit.backends.verl.settings import AgentCoreConfig
from agentcore_rl_toolkit.cli.training.settings import LocalRun, by_size

PAGE = Path(__file__).parents[1] / "docs" / "settings.md"
TRAINERS: dict[str, type[Settings]] = {
    "loop": LocalRun,
    "slime": SlimeRunner,
    "verl": AgentCoreConfig,
    "TRL": TrlConfig,
    "rLLM": RllmConfig,
    "Tinker": TinkerConfig,
    "SageMaker": SageMakerConfig,
}
INTRODUCTION = """\
# Settings of the trainers

One thing has one name in all trainers. The tables show the defaults. A required setting has no default. An empty cell means that
the trainer has no such setting. "by size" is a default that follows from the size of the model. The column "loop" is
`agentcore-rl train` without `--backend`; `--set NAME=VALUE` sets any of its settings.

In a file a setting may stand alone or in its group: `tps_limit: 25` and `limits: {tps_limit: 25}` are the same. The names in the
last column are accepted too: those of the published toolkits, and the trainers' own names.

`python scripts/settings_table.py --write` makes this page.
"""


def default_of(trainer: type[Settings], name: str) -> str:
    if name not in trainer.known():
        return ""
    if trainer is LocalRun and name in by_size(None):
        return "by size"
    field = trainer.known()[name][1]
    value: Any = trainer.DEFAULTS.get(name, field.get_default(call_default_factory=True))
    if name not in trainer.DEFAULTS and field.is_required():
        return "required"
    return "none" if value in (None, (), {}) else f"`{value}`" if not isinstance(value, tuple) else "several"


def page() -> str:
    groups: dict[str, dict[str, None]] = {}
    for trainer in TRAINERS.values():
        for name, (group, _) in trainer.known().items():
            placed = any(name in names for names in groups.values())
            groups.setdefault(group or "others", {}).update({} if placed else {name: None})
    lines = [INTRODUCTION]
    for group, names in sorted(groups.items(), key=lambda item: item[0] == "others"):
        if not names:
            continue
        lines += [
            f"## {group}\n",
            f"| setting | {' | '.join(TRAINERS)} | other names |",
            "|---" * (len(TRAINERS) + 2) + "|",
        ]
        for name in names:
            aliases = {a for t in TRAINERS.values() for a, place in t.ALIASES.items() if place == name}
            cells = [
                f"`{name}`",
                *(default_of(t, name) for t in TRAINERS.values()),
                ", ".join(f"`{a}`" for a in sorted(aliases)),
            ]
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="replace docs/settings.md")
    if parser.parse_args().write:
        PAGE.write_text(page())
    else:
        print(page(), end="")


if __name__ == "__main__":
    main()
