"""The sync face: results, errors, interruption, forks, and what is refused."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import signal
import threading
import time

import pytest

from agentcore_rl_toolkit._portal import Portal, result_of
from agentcore_rl_toolkit.errors import ConfigError


async def fine() -> int:
    return 7


def test_results_and_errors_come_through_and_its_own_thread_is_refused() -> None:
    portal = Portal("test-portal")

    async def broken() -> None:
        raise KeyError("x")

    async def inside() -> None:
        portal.call(fine())

    assert portal.call(fine()) == 7
    with pytest.raises(KeyError):
        portal.call(broken())
    with pytest.raises(ConfigError, match="would wait for itself"):
        portal.call(inside())
    portal.close()


@pytest.mark.parametrize("clean_up_s", [0.0, 60.0])
def test_an_interrupted_wait_cancels_the_work_and_grants_it_its_clean_up(clean_up_s: float) -> None:
    portal = Portal("test-portal")
    started, cleaned = threading.Event(), threading.Event()

    async def long() -> None:
        started.set()
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.2)
            cleaned.set()

    def interrupt() -> None:
        started.wait(10)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    began_s = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        portal.call(long(), clean_up_s=clean_up_s)
    assert time.monotonic() - began_s < 30  # it waits for the clean-up, and not for all of its time
    assert cleaned.is_set() is bool(clean_up_s)
    assert cleaned.wait(10)
    thread.join()
    portal.close()


def test_a_closed_portal_leaves_no_thread_and_says_what_was_closed() -> None:
    portal = Portal("test-portal-closed", owner="client")
    portal.call(fine())
    portal.close()
    portal.close()
    assert not [t for t in threading.enumerate() if t.name == "test-portal-closed"]
    with pytest.raises(ConfigError, match="the client is closed"):
        portal.call(fine())
    portal.post(time.sleep, 0)  # nobody is there to do it, and nobody minds


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize(("owner", "exit_code"), [(None, 7), ("client", 3)])
def test_a_forked_child_gets_a_fresh_loop_or_is_told_to_make_its_owner_anew(owner: str | None, exit_code: int) -> None:
    portal = Portal("test-portal", owner=owner)
    portal.call(fine())
    portal._lock.acquire()  # as if another thread of the parent were just starting the loop
    child = os.fork()
    if child == 0:
        try:
            os._exit(portal.call(fine()))
        except ConfigError as e:
            os._exit(3 if "make one in the child" in str(e) else 4)
        finally:
            os._exit(5)
    portal._lock.release()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == exit_code
    portal.close()


def test_a_signal_that_wakes_nobody_ends_a_wait_and_a_limit_still_holds() -> None:
    never: concurrent.futures.Future[int] = concurrent.futures.Future()
    thread = threading.Timer(0.2, lambda: signal.pthread_kill(threading.get_ident(), signal.SIGINT))
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        result_of(never)
    thread.join()
    with pytest.raises(TimeoutError):
        result_of(never, 0.01)
    never.set_exception(TimeoutError("the work's own"))
    with pytest.raises(TimeoutError, match="the work's own"):
        result_of(never)
