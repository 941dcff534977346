"""``python -m agentcore_rl_toolkit.backends.verl.main key=value ...``: verl's trainer with rollouts on AgentCore.

Takes verl's own hydra overrides and ours (``actor_rollout_ref.rollout.agentcore.KEY=VALUE`` or
``agentcore.KEY=VALUE``), checks them, and becomes ``python -m verl.trainer.main_ppo`` with them. ``--dry-run`` prints
that command instead.
"""

from __future__ import annotations

import os
import sys

from ...errors import ConfigError
from ..settings import fault_of_the_command
from .settings import plan


def main() -> None:
    """End with a message on a wrong setting; otherwise this process becomes verl's."""
    with fault_of_the_command():
        made = plan([word for word in sys.argv[1:] if word != "--dry-run"])
        if "--dry-run" in sys.argv:
            print(made.render())
            return
        if made.needs:
            raise ConfigError("cannot start verl:\n  " + "\n  ".join(made.needs))
    assert made.command is not None
    os.execve(sys.executable, [sys.executable, *made.command[1:]], {**os.environ, **made.environment})


if __name__ == "__main__":
    main()
