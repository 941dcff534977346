"""Entry point of a template process: ``python boot.py CONTROL_FD``.

The process runs in the *agent's* interpreter, whose environment may hold another version of this package, or none. So the
launcher is imported under an alias package that points at the folder this file lives in; the agent's own
``import agentcore_rl_toolkit`` finds whatever its environment has. Everything reachable from here is standard library only
and runs on Python 3.10.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import os
import sys
import types

ALIAS = "_agentcore_rl_launcher"


def alias_package(root: str) -> None:
    """Make ``ALIAS.x.y`` import ``root/x/y.py`` without running the package's own ``__init__``."""
    for name, path in (
        (ALIAS, root),
        (f"{ALIAS}.runtime", os.path.join(root, "runtime")),
        (f"{ALIAS}.runtime.launcher", os.path.join(root, "runtime", "launcher")),
    ):
        module = types.ModuleType(name)
        module.__path__ = [path]
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        sys.modules[name] = module


def main() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    alias_package(os.path.dirname(os.path.dirname(here)))
    if sys.path and os.path.abspath(sys.path[0]) == here:
        del sys.path[0]
    template = importlib.import_module(f"{ALIAS}.runtime.launcher.template")
    template.main(int(sys.argv[1]))


if __name__ == "__main__":
    main()
