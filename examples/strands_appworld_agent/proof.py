"""A scripted model works in a real AppWorld server, one for each rollout, on a task made here: the published data is a download.

AppWorld is in `.appworld-env` next to the agent, because a session sees only the agent's own folder. The script creates this
environment if it is missing.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from made_world import PERSON, TASK_ID  # noqa: E402

from agentcore_rl_toolkit.gateway.testing import ToolCall  # noqa: E402
from harness import Proof, mean, parser, skip, tool_calls  # noqa: E402  (examples/ has to be on the path first)

INSTALL_S = 600.0
WANTED = ("appworld==0.1.3.post1", "uvicorn")


def appworld_python() -> str:
    """Return the Python of an environment with AppWorld. Create the environment if it is missing.

    Raises: OSError, subprocess.SubprocessError if that is not possible.
    """
    home = HERE / ".appworld-env"
    python = home / "bin" / "python"
    if not python.exists():
        _run(sys.executable, "-m", "uv", "venv", "-q", "--python", sys.executable, str(home))
        _run(sys.executable, "-m", "uv", "pip", "install", "-q", "--compile-bytecode", "--python", str(python), *WANTED)
    if not list(home.glob("lib/python*/site-packages/appworld/apps/supervisor/apis.py")):
        _run(str(python), "-c", "from appworld.install import install_package; install_package()")
        # Sessions cannot write there, so each of them would compile it again.
        _run(str(python), "-c", "import appworld, compileall; compileall.compile_dir(appworld.__path__[0], quiet=2)")
    return str(python)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=INSTALL_S)


def decide(*codes: str):
    """A solver that runs these pieces of code, one per turn."""

    def solver(messages, tools):
        done = sum(message["role"] == "assistant" for message in messages)
        return [ToolCall("execute", {"code": codes[done]})] if done < len(codes) else "Done."

    return solver


ORACLE = decide(
    "me = apis.supervisor.show_profile()\nprint(me)",
    "apis.supervisor.complete_task(answer=me['last_name'])",
)
WRONG = decide("apis.supervisor.complete_task(answer='Smith')")
CURIOUS = decide("print(open('data/tasks').read())", "import os; os.system('true')", "apis.supervisor.complete_task(")
NOTHING = decide()


def main() -> None:
    options = parser(__doc__).parse_args()
    try:
        python = appworld_python()
    except (OSError, subprocess.SubprocessError) as e:
        said = getattr(e, "stderr", b"") or b""
        skip(HERE, options, f"AppWorld could not be installed: {e} {said.decode(errors='replace')[-300:]}")
    with (
        tempfile.TemporaryDirectory(prefix=".made-root-", dir=HERE) as root,
        Proof(
            example=HERE,
            framework="Strands Agents",
            options=options,
            session_env={"APPWORLD_PYTHON": python, "APPWORLD_ROOT": root},
            max_concurrent=2,
            rollout_timeout_s=900.0,
        ) as proof,
    ):
        _run(python, str(HERE / "made_world.py"), root)
        task = [{"task_id": TASK_ID}]
        solved, idle = proof.run(task * (1 if proof.quick else 2), ORACLE), proof.run(task, NOTHING)
        others = [] if proof.quick else [*proof.run(task, WRONG), *proof.run(task, CURIOUS)]
        results = [*solved, *idle, *others]
        proof.row(
            rollouts=len(results),
            oracle_reward=mean(solved),
            noop_reward=mean(idle),
            tool_calls=tool_calls(results),
            note=f"one task made here for {PERSON['first_name']}; the published data is a download",
        )
        proof.check_all_ok(results)
        proof.check("the oracle solves the task", value=mean(solved), target=1.0, ok=mean(solved) == 1.0)
        proof.check("doing nothing scores nothing", value=mean(idle), target=0.0, ok=mean(idle) == 0.0)
        if others:
            proof.check(
                "wrong and curious solvers score nothing", value=mean(others), target=0.0, ok=mean(others) == 0.0
            )


if __name__ == "__main__":
    main()
