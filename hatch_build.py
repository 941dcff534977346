"""Builds the compiled reader of replies into the package when there is a C compiler; without one the wheel is pure Python."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = Path("src/agentcore_rl_toolkit/gateway/_scan.c")


class CompiledReader(BuildHookInterface):
    """Runs for wheels and editable installs. ``AGENTCORE_RL_PURE=1`` leaves the extension out."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if os.environ.get("AGENTCORE_RL_PURE"):
            return
        try:
            built = self._build()
        except (Exception, SystemExit) as e:  # whatever a compiler or its absence throws
            self.app.display_warning(f"the gateway's compiled reader was not built, a slower one takes its place: {e}")
            return
        build_data["artifacts"].append(f"/{built.relative_to(self.root).as_posix()}")
        build_data["pure_python"] = False
        build_data["infer_tag"] = True

    def _build(self) -> Path:
        """Compile next to the source. Raises: whatever the compiler does."""
        from setuptools import Distribution, Extension
        from setuptools.command.build_ext import build_ext

        source = Path(self.root) / SOURCE
        extension = Extension("agentcore_rl_toolkit.gateway._scan", [str(source)], extra_compile_args=["-O3"])
        with tempfile.TemporaryDirectory() as folder:
            command = build_ext(Distribution({"ext_modules": [extension]}))
            command.build_lib = command.build_temp = folder
            command.ensure_finalized()
            command.run()
            made = Path(command.get_ext_fullpath(extension.name))
            target = source.with_name(made.name)
            # In one step: a process of another environment may have the old one loaded.
            beside = target.with_name(f".{made.name}.{os.getpid()}")
            beside.write_bytes(made.read_bytes())
            beside.replace(target)
        print(f"built {target.name}", file=sys.stderr)
        return target
