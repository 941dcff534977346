"""Runs a module of this package in any interpreter: ``python boot.py MODULE ARGUMENT...``.

The interpreter may be the *agent's*, whose environment may hold another version of this package, or none. So this copy of the
package is imported under an alias. The agent's own ``import agentcore_rl_toolkit`` finds the package of its environment.
Everything reachable from here is standard library only and runs on Python 3.10.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import os
import sys
import types
from typing import Any

ALIAS = "_agentcore_rl_runtime"  # the package, without running its `__init__`


def load(name: str) -> Any:
    """Import the module ``name`` (as in ``runtime.template.process``) of this copy of the package."""
    if ALIAS not in sys.modules:
        package = sys.modules[ALIAS] = types.ModuleType(ALIAS)
        package.__path__ = [os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))]
        package.__spec__ = importlib.machinery.ModuleSpec(ALIAS, None, is_package=True)
    return importlib.import_module(f"{ALIAS}.{name}")


def main() -> None:
    """Call the module's ``main`` with the arguments, without this folder in the import path."""
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != os.path.dirname(os.path.abspath(__file__))]
    module, *arguments = sys.argv[1:]
    load(module).main(*arguments)


if __name__ == "__main__":
    main()
