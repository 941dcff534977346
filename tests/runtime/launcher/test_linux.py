"""The system calls of a launcher, as the kernel shows their effects."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import sys

import pytest

from agentcore_rl_toolkit.runtime.launcher import linux

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="they do nothing elsewhere")
# It signals its parent, binds a port and starts a program.
LOOK_OUTSIDE = """
import os, socket, subprocess
try:
    os.kill(os.getppid(), 0)
except PermissionError:
    print("inside")
socket.socket().bind(("127.0.0.1", 0))
subprocess.run(["true"], check=True)
"""


def test_the_kernel_has_the_signal_at_the_parents_end() -> None:
    found, get = ctypes.c_int(), 2  # PR_GET_PDEATHSIG
    for number in (signal.SIGURG, 0):
        linux.die_with_parent(number)
        assert ctypes.CDLL(None).prctl(get, ctypes.byref(found)) == 0
        assert found.value == number


def test_a_process_that_keeps_signals_inside_may_do_all_else() -> None:
    if ctypes.CDLL(None).syscall(linux.CREATE_RULESET, None, 0, 1) < 6:
        pytest.skip("this kernel has no such rules")

    def limit() -> None:
        os.close(0)  # then it is the descriptor of the rules
        linux.keep_signals_inside()

    command = [sys.executable, "-c", LOOK_OUTSIDE]
    done = subprocess.run(command, preexec_fn=limit, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr, done.returncode) == ("inside\n", "", 0)


@pytest.mark.parametrize(("before", "limit", "bound"), [(-1, -2, -1), (-1, 30, 30), (29, 30, 29), (31, 30, 30)])
def test_a_memory_limit_is_never_above_an_earlier_one(before: int, limit: int, bound: int) -> None:
    """The values are powers of two, -1 without a limit, and -2 where none is set."""
    sizes = {-2: None, -1: resource.RLIM_INFINITY, **{power: 2**power for power in (29, 30, 31)}}

    def prepare() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (sizes[before], sizes[before]))
        linux.set_memory_limit(sizes[limit])

    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, preexec_fn=prepare) as process:
        assert resource.prlimit(process.pid, resource.RLIMIT_DATA) == (sizes[bound], sizes[bound])
        assert resource.prlimit(process.pid, resource.RLIMIT_CORE) == (0, 0)
        assert process.pid in linux.children()
        assert linux.children(process.pid) == []
