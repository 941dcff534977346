"""Run an agent's file, or a module with ``-m``, as it is: `python -m agentcore_rl_toolkit.app.deployed FILE`."""

import os
import runpy
import sys

from ...contract import AS_IS
from .start import prepare

if __name__ == "__main__":
    os.environ.setdefault(AS_IS, "1")
    prepare()
    is_module = sys.argv[1] == "-m"
    sys.argv = sys.argv[1 + is_module :]
    if is_module:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
        runpy.run_path(sys.argv[0], run_name="__main__")
