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


def test_the_kernel_has_the_signal_at_the_parents_end() -> None:
    found, get = ctypes.c_int(), 2  # PR_GET_PDEATHSIG
    for number in (signal.SIGURG, 0):
        linux.die_with_parent(number)
        assert ctypes.CDLL(None).prctl(get, ctypes.byref(found)) == 0
        assert found.value == number


def test_a_process_that_keeps_signals_inside_may_start_programs_and_bind_ports() -> None:
    if ctypes.CDLL(None).syscall(linux.CREATE_RULESET, None, 0, 1) < 6:
        pytest.skip("this kernel has no such rules")

    def limit() -> None:
        os.close(0)  # then it is the descriptor of the rules
        ctypes.CDLL(None).prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS, without which only root may have rules
        linux.keep_signals_inside()

    code = "import os, socket; socket.socket().bind(('127.0.0.1', 0)); print('bound', flush=True); os.kill(os.getppid(), 0)"
    done = subprocess.run([sys.executable, "-c", code], preexec_fn=limit, capture_output=True, timeout=60)
    assert (done.stdout, b"PermissionError" in done.stderr) == (b"bound\n", True)


@pytest.mark.parametrize(("before", "limit", "bound"), [(-1, None, -1), (-1, 30, 30), (29, 30, 29), (31, 30, 30)])
def test_a_memory_limit_is_never_above_an_earlier_one(before: int, limit: int | None, bound: int) -> None:
    sizes = {None: None, -1: resource.RLIM_INFINITY, **{power: 2**power for power in (29, 30, 31)}}

    def prepare() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (sizes[before], sizes[before]))
        linux.set_memory_limit(sizes[limit])

    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, preexec_fn=prepare) as process:
        assert resource.prlimit(process.pid, resource.RLIMIT_DATA) == (sizes[bound], sizes[bound])
        assert resource.prlimit(process.pid, resource.RLIMIT_CORE) == (0, 0)
        assert process.pid in linux.children()
        assert linux.children(process.pid) == []
