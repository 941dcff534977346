"""``python -m agentcore_rl_toolkit.backends.verl.main key=value ...``: verl's trainer with rollouts on AgentCore.

Takes verl's own hydra overrides and ours (``actor_rollout_ref.rollout.agentcore.KEY=VALUE`` or
``agentcore.KEY=VALUE``), checks them, and becomes ``python -m verl.trainer.main_ppo`` with them. ``--dry-run`` prints
that command instead.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from ...errors import AgentCoreRLError
from .settings import plan


def main(arguments: Sequence[str] | None = None) -> None:
    """Exit code 2 with a message on a wrong setting; otherwise this process becomes verl's."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    dry_run = "--dry-run" in given
    try:
        made = plan([a for a in given if a != "--dry-run"])
    except AgentCoreRLError as e:
        print(f"error: {e}", file=sys.stderr)
        sys.exit(2)
    if dry_run:
        print(made.render())
        return
    if made.needs:
        print("error: cannot start verl:\n  " + "\n  ".join(made.needs), file=sys.stderr)
        sys.exit(2)
    assert made.command is not None
    os.execve(sys.executable, [sys.executable, *made.command[1:]], {**os.environ, **made.environment})


if __name__ == "__main__":
    main()
