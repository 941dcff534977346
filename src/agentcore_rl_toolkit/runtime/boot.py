"""Runs a module of the runtime in whatever interpreter is at hand: ``python boot.py MODULE ARGUMENT...``.

The interpreter may be the *agent's*, whose environment may hold another version of this package, or none. So the runtime is
imported under an alias package that points at the folder this file lies in; the agent's own ``import agentcore_rl_toolkit``
finds whatever its environment has. Everything reachable from here is standard library only and runs on Python 3.10.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import os
import sys
import types
from typing import Any

ALIAS = "_agentcore_rl_runtime"


def load(name: str) -> Any:
    """The module ``name`` (as in ``template.process``) of this runtime, without running the package's own ``__init__``."""
    here = os.path.dirname(os.path.abspath(__file__))
    for package, path in ((ALIAS, os.path.dirname(here)), (f"{ALIAS}.runtime", here)):
        if package not in sys.modules:
            made = sys.modules[package] = types.ModuleType(package)
            made.__path__ = [path]
            made.__spec__ = importlib.machinery.ModuleSpec(package, None, is_package=True)
    return importlib.import_module(f"{ALIAS}.runtime.{name}")


def main() -> None:
    """Call the module's ``main`` with the arguments."""
    if sys.path and os.path.abspath(sys.path[0]) == os.path.dirname(os.path.abspath(__file__)):
        del sys.path[0]
    module, *arguments = sys.argv[1:]
    load(module).main(*arguments)


if __name__ == "__main__":
    main()
