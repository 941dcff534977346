"""This installation of the toolkit: the command that adds an extra, the wheel of exactly this version, and tools next to it.

The package index has another product under this toolkit's name, so nothing is ever installed from there by that name: extras
come from where this installation came from, and an agent's environment gets a wheel written from the files that run here.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator, Sequence
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from .errors import AgentCoreRLError, ConfigError, MissingExtraError

NAME = "agentcore-rl-toolkit"
PACKAGE = Path(__file__).resolve().parent
_WHEEL = "Wheel-Version: 1.0\nGenerator: agentcore-rl-toolkit\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
_COMPILED = frozenset({".so", ".pyd", ".pyc"})
_LONG_AGO = (1980, 1, 1, 0, 0, 0)  # the same files give the same wheel


def missing_extra(what: str, extra: str) -> MissingExtraError:
    """Return the error for a part that is not installed: ``what`` it needs, and the command that installs it."""
    return MissingExtraError(f"{what}. Install it with:\n    {install_command(extra)}")


def require(module: str, *, extra: str | None = None) -> Any:
    """Import a module of an extra, or of a package that no extra has. Raises: MissingExtraError."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as e:
        package = module.partition(".")[0]
        if e.name is None or e.name.partition(".")[0] != package:
            raise  # it is there, and lacks something itself
        how = f"pip install {package}" if extra is None else install_command(extra)
        raise MissingExtraError(f"this needs {package}, which is not installed. Install it with:\n    {how}") from e


@functools.cache
def install_command(*extras: str) -> str:
    """Return the pip command that adds extras to this installation, from its own source. Source: PEP 610."""
    named = f"[{','.join(extras)}]" if extras else ""
    installed = _installed()
    text = installed.read_text("direct_url.json") if installed is not None else None
    if text is None:
        version = installed.version if installed is not None else "VERSION"
        return f"pip install 'agentcore_rl_toolkit-{version}-py3-none-any.whl{named}'    # the wheel that `make wheel` builds"
    origin = json.loads(text)
    url = str(origin["url"])
    if "vcs_info" in origin:
        url = f"{origin['vcs_info']['vcs']}+{url}@{origin['vcs_info']['commit_id']}"
    if not url.startswith("file:") or url.endswith(".whl"):
        return f"pip install {shlex.quote(f'{NAME}{named} @ {url}')}"
    editable = "-e " if origin.get("dir_info", {}).get("editable") else ""
    return f"pip install {editable}{shlex.quote(unquote(urlsplit(url).path) + named)}"


def _installed() -> Distribution | None:
    try:
        return distribution(NAME)
    except PackageNotFoundError:
        return None


def find_uv() -> str:
    """Return the path of uv: next to this interpreter, or on PATH. Raises: ConfigError."""
    found = shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv")
    if found is None:
        raise ConfigError("the packages of an agent are installed with uv: pip install uv")
    return found


def run_tool(
    command: Sequence[str],
    *,
    within_s: float,
    failure: str,
    error: type[AgentCoreRLError] = ConfigError,
    **options: Any,
) -> str:
    """Run a command, and return its output. Blocks. Raises: ``error`` with the end of the output."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=within_s, check=False, **options)
    except subprocess.TimeoutExpired as e:
        raise error(f"{failure}: {shlex.join(command)} took more than {within_s:.0f} s") from e
    if done.returncode:
        last = "\n".join((done.stderr or done.stdout).strip().splitlines()[-15:])
        raise error(f"{failure}: {shlex.join(command)} ended with {done.returncode}\n{last}")
    return str(done.stdout)


def wheel_digest() -> str:
    """Return hexadecimal digits that identify the wheel of `write_wheel`, without packing it. Raises: as that."""
    found = hashlib.sha256()
    for name, data in _contents()[1].items():
        found.update(f"{name}\0{len(data)}\0".encode())
        found.update(data)
    return found.hexdigest()


def write_wheel(folder: Path) -> Path:
    """Write the wheel of the running version into ``folder``, without its compiled parts: it fits every machine.

    It holds the files that run here, also where they are a checkout's. The same files give the same bytes. Takes no
    network and no build tools. Raises: ConfigError when this toolkit runs without being installed.
    """
    title, contents = _contents()
    record = ""
    for name, data in contents.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record += f"{name},sha256={digest},{len(data)}\n"
    contents[f"{title}.dist-info/RECORD"] = f"{record}{title}.dist-info/RECORD,,\n".encode()
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{title}-py3-none-any.whl"
    made = folder / f".{target.name}.{os.getpid()}"
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in contents.items():
            entry = zipfile.ZipInfo(name, _LONG_AGO)
            entry.external_attr, entry.compress_type = 0o644 << 16, zipfile.ZIP_DEFLATED
            archive.writestr(entry, data)
    return made.replace(target)


def _contents() -> tuple[str, dict[str, bytes]]:
    """Return name and version, and the files of a wheel in a fixed order, without its RECORD. Raises: ConfigError."""
    installed = _installed()
    if installed is None:
        raise ConfigError(f"{PACKAGE} is not installed, so there is no wheel of it: pip install -e . in its checkout")
    title = f"{PACKAGE.name}-{installed.version}"
    info = f"{title}.dist-info"
    contents = {f"{PACKAGE.name}/{name}": path.read_bytes() for name, path in _files()}
    for name in ("METADATA", "entry_points.txt"):
        contents[f"{info}/{name}"] = (installed.read_text(name) or "").encode()
    for file in installed.files or ():
        if "licenses" in file.parts:
            contents[f"{info}/{'/'.join(file.parts[1:])}"] = file.read_binary()
    contents[f"{info}/WHEEL"] = _WHEEL.encode()
    return title, contents


def _files() -> Iterator[tuple[str, Path]]:
    """Return the names of the package's files in a wheel, with their paths on this machine, in a fixed order."""
    found = {path.relative_to(PACKAGE).as_posix(): path for path in _below(PACKAGE)}
    project = PACKAGE.parents[1] / "pyproject.toml"
    if project.is_file():  # a checkout: what the build adds to the package is not in it
        wheel = tomllib.loads(project.read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
        for source, target in wheel["force-include"].items():
            inside, whole = Path(target).relative_to(PACKAGE.name), project.parent / source
            for path in [whole] if whole.is_file() else _below(whole):
                found[(inside / path.relative_to(whole)).as_posix()] = path
    yield from sorted(found.items())


def _below(folder: Path) -> Iterator[Path]:
    for path in folder.rglob("*"):
        parts = path.relative_to(folder).parts
        hidden = any(part.startswith(".") or part == "__pycache__" for part in parts)
        if path.is_file() and not hidden and path.suffix not in _COMPILED:
            yield path
