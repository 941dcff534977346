"""Short programs that use a remote store end as they should, however quickly they end."""

from __future__ import annotations

import _thread
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from agentcore_rl_toolkit.store.leaving import settle

SHORT = """
from agentcore_rl_toolkit.store import open_store
store = open_store({url!r})
store.put("k{n}", b"1")
assert store.get("k{n}") == b"1"
"""


def test_a_program_that_ends_right_after_a_call_is_not_aborted(bucket: str) -> None:
    def run(n: int) -> tuple[int, bytes]:
        code = SHORT.format(url=bucket, n=n)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=300)
        return done.returncode, done.stderr

    with ThreadPoolExecutor(6) as pool:
        assert set(pool.map(run, range(18))) == {(0, b"")}


def test_it_waits_for_threads_that_python_does_not_know_and_no_longer_than_told() -> None:
    go_on, ended = threading.Event(), threading.Event()

    def busy() -> None:  # started below the `threading` module, as a thread of an extension is
        while not go_on.is_set():
            time.sleep(0.001)
        ended.set()

    _thread.start_new_thread(busy, ())
    began = time.monotonic()
    assert settle(longest_s=0.2) is False
    assert time.monotonic() - began < 30.0
    go_on.set()
    assert ended.wait(60)
    assert settle(longest_s=60.0) is True
