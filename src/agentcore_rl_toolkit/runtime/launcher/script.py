"""Run an unmodified agent script as ``__main__`` and take over where it would start its server."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable
from typing import Any

TakeOver = Callable[[Any, dict[str, Any]], None]


class ScriptEndedError(Exception):
    """The script came to its end without starting a server."""


def run_script(path: str, argv: list[str], take_over: TakeOver) -> None:
    """Execute the file as ``__main__``; ``uvicorn.run(app, **options)`` becomes ``take_over(app, options)``.

    Raises: ScriptEndedError when the file never calls it; whatever the file raises.
    """
    import uvicorn

    def run(app: Any, **options: Any) -> None:
        take_over(app, options)

    uvicorn.run = run  # looked up at call time by BedrockAgentCoreApp.run and by most scripts
    if "uvicorn.main" in sys.modules:
        sys.modules["uvicorn.main"].run = run  # type: ignore[attr-defined]
    main = types.ModuleType("__main__")
    main.__file__ = path
    main.__builtins__ = __builtins__  # type: ignore[attr-defined]
    sys.modules["__main__"] = main
    sys.argv = [path, *argv]
    sys.path.insert(0, os.path.dirname(path))
    with open(path, "rb") as f:
        code = compile(f.read(), path, "exec")
    exec(code, main.__dict__)
    raise ScriptEndedError(
        f"{path} ended without starting a server; it should finish with\n\n"
        '    if __name__ == "__main__":\n        app.run()\n'
    )
