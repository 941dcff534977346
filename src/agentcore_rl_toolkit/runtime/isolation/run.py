"""Entry script: ``python run.py exec TIER SPEC_JSON -- ARGV...`` and ``python run.py probe DIR``.

Run by path in whatever interpreter is at hand, so it brings this package along under another name instead of importing an
installed one (which may be absent or older there). Standard library only.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import os
import sys
import types
from typing import Any

_ALIAS = "_agentcore_rl_isolation"


def _module(name: str) -> Any:
    here = os.path.dirname(os.path.abspath(__file__))
    root = os.path.dirname(os.path.dirname(here))
    for package, path in (
        (_ALIAS, root),
        (f"{_ALIAS}.runtime", os.path.dirname(here)),
        (f"{_ALIAS}.runtime.isolation", here),
    ):
        module = types.ModuleType(package)
        module.__path__ = [path]
        module.__spec__ = importlib.machinery.ModuleSpec(package, None, is_package=True)
        sys.modules[package] = module
    return importlib.import_module(f"{_ALIAS}.runtime.isolation.{name}")


def main() -> None:
    """Confine this process, then become the command; or try the namespaces tier once and exit with 0 if it works."""
    if sys.path and os.path.abspath(sys.path[0]) == os.path.dirname(os.path.abspath(__file__)):
        del sys.path[0]
    tiers = _module("tiers")
    spec_module = _module("spec")
    if sys.argv[1] in ("probe", "probe-loader"):
        folder = sys.argv[2]
        if sys.argv[1] == "probe-loader":
            sessions, home = os.path.join(folder, "sessions"), os.path.join(folder, "home", "own")
            for path in (os.path.join(sessions, "one"), home):
                os.makedirs(path)
            loader = spec_module.IsolationSpec(session_dir=home, writable=(sessions,), network="none", name="loader")
            tiers.TIERS["namespaces"].confine_loader(loader)
            folder = os.path.join(sessions, "one")
        spec = spec_module.IsolationSpec(session_dir=folder, network="none", name="agentcore-rl-probe")
        pid = tiers.TIERS["namespaces"].fork(spec)
        if pid == 0:
            tiers.TIERS["namespaces"].confine_child(spec)
            os._exit(0 if os.getpid() == 1 else 3)
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    tier, text, separator, *argv = sys.argv[2:]
    if sys.argv[1] != "exec" or separator != "--" or not argv:
        sys.exit("usage: run.py exec TIER SPEC_JSON -- COMMAND...")
    tiers.TIERS[tier].confine_child(spec_module.IsolationSpec.from_json(text))
    os.execvp(argv[0], argv)


if __name__ == "__main__":
    main()
