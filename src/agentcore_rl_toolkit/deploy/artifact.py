"""The artifact of a deployment: an image of the agent's folder, or an archive of it. Both are named by their content."""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import json
import platform
import re
import shutil
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from .._installation import NAME as TOOLKIT
from .._installation import find_uv, run_tool, wheel_digest, write_wheel
from ..errors import ConfigError

# AgentCore Runtime runs linux/arm64 only. Source: its developer guide, "Get started without the AgentCore CLI".
AGENTCORE_PLATFORM = "linux/arm64"
UV_PLATFORMS = {"linux/arm64": "aarch64-manylinux_2_28", "linux/amd64": "x86_64-manylinux_2_28"}
BUILD_S, PUSH_S, RESOLVE_S, ANSWER_S = 3600.0, 3600.0, 900.0, 30.0
# Patterns of names of files and folders, in lower case. `deploy` writes .env itself, and rows may contain the answers.
_SECRETS = """.aws .azure .docker .env* .git-credentials .gnupg .kube .netrc .npmrc .pgpass .pypirc .ssh .vault-token
    .*credentials* *.env *.jks *.kdbx *.key *.keystore *.p12 *.p8 *.pem *.pfx *.ppk client_secret*.json credentials*.json
    gha-creds-*.json id_dsa* id_ecdsa* id_ed25519* id_rsa* kubeconfig secrets.json secrets.toml secrets.y*ml
    service[-_]account*.json"""
_STATE = """.agentcore-rl .git .ipynb_checkpoints .mypy_cache .pytest_cache .ruff_cache .terraform .venv .venvs *.ipynb
    *.tfstate* *.tfvars __pycache__ node_modules"""
_ROWS = "eval.jsonl rows.jsonl train.jsonl"
NOT_THE_AGENT = f"{_SECRETS} {_STATE} {_ROWS}".split()
START_FILE, REQUIREMENTS = "agentcore_rl_start.py", "agentcore_rl_requirements.txt"
NAMES_PACKAGES = {"requirements.txt", "pyproject.toml", "uv.lock"}
# A requirement that is the toolkit, by its name or the path of its wheel.
_OURS = re.compile(rf"\s*(?:\./)?(?:wheels/)?{TOOLKIT.replace('-', '[-_]')}(?![-_]?[a-z])", re.IGNORECASE)
_TRACING = re.compile(r"\s*aws[-_.]opentelemetry[-_.]distro(?![\w-])", re.IGNORECASE)


def this_platform() -> str:
    """Return this machine's platform, as images name it."""
    machine = platform.machine().lower()
    return "linux/arm64" if machine in ("arm64", "aarch64") else "linux/amd64"


def files_of(folder: Path, excluded: Iterable[Path] = ()) -> list[Path]:
    """Return the agent's own files in a fixed order.

    Environments, caches, runs, keys and the usual files of rows are left out, and the paths in ``excluded`` with all below them.
    A link counts as the file or the folder that it leads to. Raises: ConfigError for a link out of the folder.
    """
    root, left_out = folder.resolve(), {path.resolve() for path in excluded}
    found: list[Path] = []

    def visit(parent: Path, above: frozenset[Path]) -> None:
        for path in sorted(parent.iterdir()):
            real = path.resolve()
            below = [each for each in (real, *real.parents) if root in each.parents]
            if any(map(_is_not_the_agents, (path, *below))) or left_out.intersection((real, *real.parents)):
                continue
            if not real.is_relative_to(root):
                raise ConfigError(
                    f"{path} is a link out of the folder, to {real}: copy what the agent needs into the folder, or leave the "
                    "link out with --exclude"
                )
            if path.is_file():
                found.append(path)
            elif path.is_dir() and real not in above:  # otherwise a circle of links
                visit(path, above | {real})

    visit(folder, frozenset((root,)))
    return found


def _is_not_the_agents(path: Path) -> bool:
    if path.name == "runs" and path.is_dir():
        return not any(path.glob("*.py"))  # a package may have this name
    named = any(fnmatch.fnmatchcase(path.name.lower(), pattern) for pattern in NOT_THE_AGENT)
    return named or (path / "pyvenv.cfg").is_file()


def stage(
    folder: Path,
    into: Path,
    *,
    entry: str,
    excluded: Iterable[Path] = (),
    module: str | None = None,
    import_paths: Sequence[str] = (),
    python: str | None = None,
) -> Path:
    """Copy the agent's files to ``into``, and write the files that it lacks. Returns ``into``.

    Args:
        entry: the file that is started.
        module: name of the agent's module if it is no file of the folder itself: ``entry`` is written, and runs it.
        import_paths: folders inside ``folder`` that its import path begins with.
        python: version of Python for a Dockerfile, which is written if the folder has none. None: no image.

    Raises: ConfigError if the folder does not name its packages.
    """
    _copy(files_of(folder, excluded), folder, into)
    if module is not None:
        (into / entry).write_text(start_file(module, paths=import_paths))
    if python is not None and not (into / "Dockerfile").is_file():
        packages = requirements_of(folder)
        (into / REQUIREMENTS).write_text("\n".join(packages) + "\n")
        command = json.dumps([*tracing_of(packages), "python", entry])
        (into / "Dockerfile").write_text(_DOCKERFILE.format(python=python, requirements=REQUIREMENTS, command=command))
    return into


def _copy(files: Iterable[Path], folder: Path, into: Path) -> None:
    for path in files:
        place = into / path.relative_to(folder)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, place)


def start_file(module: str, *, paths: Iterable[str] = (), arguments: Iterable[str] = ()) -> str:
    """Return a file that runs a module as `python -m` does. Import paths and arguments are relative to its folder."""
    here = [", ".join(f"os.path.join(HERE, {path!r})" for path in each) for each in (paths, arguments)]
    return _START.format(module=module, paths=here[0], arguments=here[1])


_START = """# Starts the agent: runs a module as `python -m` does.
import os
import runpy
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [{paths}]
sys.argv[1:1] = [{arguments}]
runpy.run_module({module!r}, run_name="__main__", alter_sys=True)
"""
_DOCKERFILE = """FROM python:{python}-slim
ENV PYTHONUNBUFFERED=1 DOCKER_CONTAINER=1
RUN useradd --create-home agent
WORKDIR /app
COPY . .
RUN pip install --no-cache-dir wheels/*.whl -r {requirements}
USER agent
EXPOSE 8080
CMD {command}
"""


def digest_of(folder: Path, *more: str) -> str:
    """Return 12 hexadecimal digits for a folder's content, without the toolkit's wheel, and for its build (``more``)."""
    found = hashlib.sha256(json.dumps(more).encode())
    for path in files_of(folder):
        if _is_our_wheel(path):
            continue
        data = path.read_bytes()
        mode = path.stat().st_mode & 0o100  # a script that cannot be executed is another file
        found.update(f"{path.relative_to(folder).as_posix()}\0{mode}\0{len(data)}\0".encode())
        found.update(data)
    return found.hexdigest()[:12]


def image_digest(folder: Path, target: str) -> str:
    """Return the name of an image of the folder, made from the folder, the platform, and the toolkit installed in it."""
    return digest_of(folder, target, *([wheel_digest()] if _takes_wheel(folder) else []))


def _takes_wheel(folder: Path) -> bool:
    return ".whl" in (folder / "Dockerfile").read_text()


def _is_our_wheel(path: Path) -> bool:
    return path.match("agentcore_rl_toolkit-*.whl")


def put_wheel_beside(folder: Path) -> None:
    """Put the wheel of the running version where the agent's Dockerfile takes it from: `wheels/`, or the folder itself.

    Older wheels of the toolkit there are removed: they would be in the image. A Dockerfile that names no wheel gets none.
    """
    if _takes_wheel(folder):
        _put_wheel(folder / "wheels" if "wheels/" in (folder / "Dockerfile").read_text() else folder)


def _put_wheel(folder: Path) -> Path:
    """Write the wheel of the running version, and remove older ones."""
    made = write_wheel(folder)
    for old in folder.iterdir():
        if _is_our_wheel(old) and old != made:
            old.unlink(missing_ok=True)
    return made


@dataclass(frozen=True, kw_only=True)
class ImageBuilder:
    """Docker or Podman, by its command."""

    command: str

    @classmethod
    def find(cls) -> ImageBuilder:
        """Find an engine that answers. Raises: ConfigError."""
        for found in filter(None, map(shutil.which, ("docker", "podman"))):
            with contextlib.suppress(ConfigError):
                run_tool([found, "ps"], within_s=ANSWER_S, failure="no answer")
                return cls(command=found)
        raise ConfigError(
            "neither Docker nor Podman answers here. Install one, deploy an image that exists (--image URI), or deploy without "
            "an image (--code)"
        )

    def build(self, folder: Path, *, uri: str, target: str) -> None:
        """Build an image. Raises: ConfigError with the end of the build's output."""
        command = [self.command, "build", "--platform", target, "--tag", uri, str(folder)]
        run_tool(command, within_s=BUILD_S, failure="the build failed")
        inspect = [self.command, "image", "inspect", "--format", "{{.Os}}/{{.Architecture}}", uri]
        found = run_tool(inspect, within_s=60, failure="no image").strip()
        if found != target:
            raise ConfigError(
                f"the image is for {found}, and {target} is needed: check the Dockerfile's platform and base image. "
                "On a machine of another architecture, Docker or Podman needs QEMU's binfmt handlers"
            )

    def push(self, uri: str, *, password: str) -> None:
        """Push an image to its registry. Raises: ConfigError."""
        registry = uri.split("/")[0]
        login = [self.command, "login", "--username", "AWS", "--password-stdin", registry]
        run_tool(login, within_s=60, failure=f"no login at {registry}", input=password)
        run_tool([self.command, "push", uri], within_s=PUSH_S, failure="the push failed")


def requirements_of(folder: Path) -> list[str]:
    """Return the packages in `requirements.txt` or `pyproject.toml`, without the toolkit, whose wheel is added."""
    named, project = folder / "requirements.txt", folder / "pyproject.toml"
    if named.is_file():
        lines = named.read_text().splitlines()
    elif project.is_file():
        table = tomllib.loads(project.read_text()).get("project")
        if table is None or "dependencies" in table.get("dynamic", []):
            raise ConfigError(
                f"{project} has no dependencies in [project]: name the packages there, or in requirements.txt"
            )
        lines = table.get("dependencies", [])
    else:
        raise ConfigError(
            f"{folder} has neither requirements.txt nor pyproject.toml: add one with the agent's packages"
        )
    return [line for line in lines if not _OURS.match(line)]


def tracing_of(packages: Iterable[str]) -> list[str]:
    """Return the word before the command that traces the agent, if AWS's distribution of OpenTelemetry is a package of it."""
    return ["opentelemetry-instrument"] if any(map(_TRACING.match, packages)) else []


def make_archive(folder: Path, *, target: str, python: str, into: Path) -> Path:
    """Make an archive for direct code deployment: the agent's files, its packages for ``target``, the toolkit.

    Args:
        target: platform, such as `linux/arm64`.
        python: version, such as `3.13`.
        into: an empty folder to work in.

    Raises: ConfigError when a package has no wheel for the platform.
    """
    stage = into / "stage"
    command = [find_uv(), "pip", "install", "-q", "--target", str(stage), "--python-platform", UV_PLATFORMS[target]]
    command += ["--python-version", python, "--only-binary", ":all:", "--link-mode", "copy", "-r", "-"]
    failure = f"the agent's packages are not available for {target}, Python {python}"
    wheel = str(write_wheel(into / "wheels"))
    requirements = "\n".join([wheel, *requirements_of(folder)])  # may have options and paths
    run_tool(command, within_s=RESOLVE_S, failure=failure, input=requirements, cwd=folder)
    own = [path for path in files_of(folder) if path.suffix != ".whl" and path.name not in NAMES_PACKAGES]
    _copy(own, folder, stage)
    for path in filter(Path.is_file, stage.rglob("*")):
        # AgentCore reads the archive as another user: readable for all. Source: its guide on direct code deployment.
        path.chmod(0o755 if path.stat().st_mode & 0o100 else 0o644)
    # The packages are complete: a certificate or a folder `runs` in them is part of their code.
    return Path(shutil.make_archive(str(into / "agent"), "zip", stage))


def vendor(folder: Path) -> list[str]:
    """Put the wheel of the running version into a project that another tool builds, and name it there. Returns what was done.

    `requirements.txt` gets the wheel's path. `pyproject.toml` gets the package as a dependency, and uv the wheel as its source.
    Raises: ConfigError if the folder has neither file.
    """
    requirements, project = folder / "requirements.txt", folder / "pyproject.toml"
    if not requirements.is_file() and not project.is_file():
        raise ConfigError(
            f"{folder} has neither requirements.txt nor pyproject.toml, in which the wheel could be named"
        )
    wheel = _put_wheel(folder / "wheels")
    path = f"./wheels/{wheel.name}"
    done = [f"wheels/{wheel.name}: is written"]
    if requirements.is_file():
        kept = [line for line in requirements.read_text().splitlines() if not _OURS.match(line)]
        requirements.write_text("\n".join([*kept, path]) + "\n")
        done.append("requirements.txt: names the wheel")
        if not project.is_file():
            done.append(
                "`agentcore configure` needs a pyproject.toml: its image gets requirements.txt without the wheel"
            )
    if project.is_file():
        dependencies = tomllib.loads(project.read_text()).get("project", {}).get("dependencies", [])
        ours = [line for line in dependencies if _OURS.match(line)]
        extras = next((found[0] for line in ours if (found := re.search(r"\[.*?\]", line))), "")
        # Another version would contradict the wheel.
        for package in (path, f"{TOOLKIT}{extras}=={wheel.name.split('-')[1]}"):
            command = [find_uv(), "add", package, "-q", "--frozen"]
            run_tool(command, within_s=RESOLVE_S, failure=f"{project} cannot name the wheel", cwd=folder)
        done.append("pyproject.toml: depends on the wheel, for uv; run `uv lock` if there is a uv.lock")
    return done
