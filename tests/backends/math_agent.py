"""The math agent of which one session raises."""

from __future__ import annotations

import shutil
from pathlib import Path

HERE = Path(__file__).parent
TOOLS = HERE.parents[1] / "examples" / "strands_math_agent" / "math_tools.py"


def math_agent(folder: Path) -> str:
    """The option of `runtime serve` with the agent, whose files are put into the folder: an agent sees its own only."""
    (folder / "agent").mkdir()
    for file in (HERE / "fails_once.py", TOOLS):
        shutil.copy(file, folder / "agent")
    return f"math={folder / 'agent' / 'fails_once.py'}"
