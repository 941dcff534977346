"""Run by test_scripts.py: prints the help of each script named on the command line, all in one process."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from agentcore_rl_toolkit.errors import MissingExtraError

ROOT = Path(__file__).parents[1]
SCRIPTS = sys.argv[1:]

for script in SCRIPTS:
    sys.argv = [script, "--help"]
    sys.path.insert(0, str(Path(script).parent))
    print(f"== {script}", flush=True)
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as e:
        if e.code:
            raise AssertionError(f"{script} ended with {e.code}") from e
    except MissingExtraError as e:
        print(f"{script}: {e.__cause__} is not installed")
    except ModuleNotFoundError as e:
        name = (e.name or "").partition(".")[0]
        if name == "agentcore_rl_toolkit" or any(ROOT.glob(f"*/{name}*")) or any(ROOT.glob(f"*/*/{name}*")):
            raise
        print(f"{script} needs {e.name}, which is not installed")
    else:
        raise AssertionError(f"{script} did not end at its help")
    finally:
        sys.path.pop(0)
        for name, module in list(sys.modules.items()):  # two folders have modules of the same name
            file = getattr(module, "__file__", None) or ""
            if file.startswith((f"{ROOT}/examples", f"{ROOT}/scripts", f"{ROOT}/benchmarks")) and name != "__main__":
                del sys.modules[name]
