"""The memory limit of a session, with the programs that agents are written in."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable

import pytest
from botocore.exceptions import ClientError

from agentcore_rl_toolkit.runtime.launcher.linux import set_memory_limit

from ..conftest import AGENTS, Server

PROGRAMS = {
    "python": [
        sys.executable,
        "-c",
        "import sys; x = [bytes([1]) * 2**20 for _ in range(int(sys.argv[1]))]; print('done')",
    ],
    "node": ["node", "-e", "x=[];for(let i=0;i<+process.argv[1];i++)x.push(Buffer.alloc(1<<20,1));console.log('done')"],
}


@pytest.mark.skipif(sys.platform != "linux", reason="macOS does not count what is mapped")
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_runs_below_the_limit_and_ends_above_it(program: str) -> None:
    if shutil.which(PROGRAMS[program][0]) is None:
        pytest.skip(f"{program} is not installed")

    def run(megabytes: int) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*PROGRAMS[program], str(megabytes)],
            preexec_fn=lambda: set_memory_limit(800 * 2**20),
            capture_output=True,
            text=True,
            timeout=120,
        )

    assert run(50).stdout == "done\n"
    assert run(2000).returncode != 0


@pytest.mark.skipif(sys.platform != "linux", reason="macOS does not count what is mapped")
def test_a_session_above_its_limit_has_an_error_of_its_own(
    start_server: Callable[..., Server], session_id: str
) -> None:
    server = start_server("--memory-mb", "300", agent=AGENTS / "greedy.py")
    assert server.invoke({"memory_mb": 20}, session_id) == {"held": 20}
    with pytest.raises(ClientError, match="500"):
        server.invoke({"memory_mb": 600}, session_id)
