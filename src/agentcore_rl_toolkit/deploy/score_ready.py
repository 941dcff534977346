"""A version of an agent for rollouts, made of the one for production: the same files, our package, and another command.

AgentCore's configuration of containers has no command, so an image is derived from the agent's own. Nothing of the production
version is changed.
"""

from __future__ import annotations

import getopt
import hashlib
import json
import re
import shlex
import tempfile
from collections.abc import Sequence
from pathlib import Path

from .._installation import run_tool, wheel_digest, write_wheel
from ..errors import ConfigError
from .artifact import ImageBuilder

STARTER = "agentcore_rl_toolkit.app.deployed"
READY_FILE = "agentcore_rl_score_ready.py"
_OPTIONS = "bBdEhiIOPqRsSuvVxmW:X:"  # Python's own, without `-c`
_PYTHON = re.compile(r"(?:.*/)?python3?(?:\.\d+)?")
_SERVER = re.compile(r"(?:.*/)?(?:uvicorn|fastapi)")


def start_command(words: Sequence[str]) -> list[str]:
    """Insert our starter into an image's command, after its Python and Python's options.

    The words before them stay, such as `opentelemetry-instrument`.
    Raises: ConfigError for a command that starts no file or module with Python.
    """
    for place, word in enumerate(words):
        if _PYTHON.fullmatch(word):
            try:  # the name of a module is the first word that is no option, and the words after it belong to the module
                options, started = getopt.getopt(words[place + 1 :], _OPTIONS, ["check-hash-based-pycs="])
            except getopt.GetoptError:  # such as `-c`
                break
            if not started or started[0] == "-":
                break
            module = ["-m"] * (("-m", "") in options)
            own = [part for option in options if option[0] != "-m" for part in option if part]
            return [*words[: place + 1], *own, "-m", STARTER, *module, *started]
        if _SERVER.fullmatch(word):
            python = str(Path(word).with_name("python"))
            return [*words[:place], python, "-m", STARTER, "-m", Path(word).name, *words[place + 1 :]]
    raise ConfigError(
        f"the image starts {shlex.join(words) or 'nothing'}; a version for rollouts needs a command with python or uvicorn, as a "
        "list of words, with a file or a module, and not as a line of a shell or of `python -c`"
    )


def dockerfile(base: str, command: Sequence[str], wheel: str, user: str) -> str:
    """Return the Dockerfile of the derived image. Its build fails with the reason if Python is too old or pip is missing."""
    place = next(n for n, word in enumerate(command) if _PYTHON.fullmatch(word))
    uv = next((n for n, word in enumerate(command[:place]) if Path(word).name == "uv"), place)  # it has its own Python
    python = shlex.join(word for word in command[uv : place + 1] if Path(word).name != "opentelemetry-instrument")
    old = f"the image's {python} is older than 3.11"
    check = f"import sys; sys.exit({old!r} if sys.version_info < (3, 11) else 0)"
    # Debian's own Python takes no packages otherwise. The agent's are in there already.
    pip = f"PIP_BREAK_SYSTEM_PACKAGES=1 {python} -m pip install --no-cache-dir /tmp/{wheel}"
    found = f"$({python} -c 'import sys; print(sys.executable)')"
    install = f'{pip} || uv pip install --python "{found}" /tmp/{wheel}'
    return f"""FROM {base}
USER root
COPY {wheel} /tmp/{wheel}
RUN {python} -c {shlex.quote(check)}
RUN {install} || {{ echo 'the image has neither pip nor uv for {python}'; exit 1; }}
USER {user or "root"}
ENTRYPOINT []
CMD {json.dumps(list(command))}
"""


def derived_tag(base: str) -> str:
    """Return the tag of an image that is derived from this one."""
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", base.split("/")[-1])[:50].strip("-.")
    return f"{name}-{hashlib.sha256(base.encode()).hexdigest()[:12]}-rl-{wheel_digest()[:8]}"


def derive(engine: ImageBuilder, base: str, *, uri: str, target: str) -> None:
    """Build the derived image of an agent's image. Raises: ConfigError with what the image lacks."""
    inspect = [engine.command, "image", "inspect", "--format", "{{json .Config}}", base]
    try:
        found = run_tool(inspect, within_s=60, failure="no image")
    except ConfigError:
        pull = [engine.command, "pull", "--platform", target, base]
        run_tool(pull, within_s=1800, failure="the image is not available")
        found = run_tool(inspect, within_s=60, failure="no image")
    config = json.loads(found)
    command = start_command([*(config.get("Entrypoint") or []), *(config.get("Cmd") or [])])
    with tempfile.TemporaryDirectory() as work:
        wheel = write_wheel(Path(work))
        (Path(work) / "Dockerfile").write_text(dockerfile(base, command, wheel.name, config.get("User") or ""))
        engine.build(Path(work), uri=uri, target=target)
