"""The page's scripts are typed: TypeScript's compiler reads their annotations. The library of charts is the published one."""

from __future__ import annotations

import fcntl
import hashlib
import math
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STATIC = ROOT / "src" / "agentcore_rl_toolkit" / "view" / "static"
OPTIONS = "--allowJs --checkJs --noEmit --strict false --target es2023 --module esnext --lib es2023,dom,dom.iterable"
TYPESCRIPT = "typescript@5.9.3"


@pytest.mark.system
def test_the_scripts_have_no_type_errors() -> None:
    if (npm := shutil.which("npm")) is None:
        pytest.skip("npm is not installed")
    home = ROOT / ".venvs" / "typescript"
    home.mkdir(parents=True, exist_ok=True)
    with (home / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        compiler = home / "node_modules" / ".bin" / "tsc"
        if not compiler.exists():
            made = subprocess.run(
                [npm, "install", "--silent", "--prefix", str(home), TYPESCRIPT], check=False, timeout=300
            )
            if made.returncode:
                pytest.skip("typescript cannot be installed")
    files = [*map(str, STATIC.glob("*.js")), str(STATIC / "uplot.d.ts")]
    done = subprocess.run(
        [str(compiler), *OPTIONS.split(), *files], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout == ""
    lines = [line for file in files for line in Path(file).read_text().splitlines()]
    assert sum(max(1, math.ceil(len(line) / 120)) for line in lines) <= 1600


def test_the_library_of_charts_is_unmodified() -> None:
    digests = dict(re.findall(r"\| `([\w.]+)` \| `(\w{64})` \|", (STATIC / "vendor" / "README.md").read_text()))
    assert len(digests) == 2
    for name, digest in digests.items():
        assert hashlib.sha256((STATIC / "vendor" / name).read_bytes()).hexdigest() == digest
