"""What a template tries in a throw-away fork before it does it itself."""

from __future__ import annotations

import subprocess
import sys

# In a process of its own: a fork of this one, which has threads, would be another case.
TRY = """
import threading, time
from agentcore_rl_toolkit.runtime.template import warm

def leaves(seconds):
    threading.Thread(target=time.sleep, args=(seconds,), daemon=True).start()

print(warm.works_in_a_fork(lambda: leaves(0.2)), warm.works_in_a_fork(lambda: leaves(600)), warm.works_in_a_fork(lambda: 1 / 0))
"""


def test_a_thread_that_is_about_to_end_is_waited_for_and_one_that_stays_is_not() -> None:
    done = subprocess.run([sys.executable, "-c", TRY], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.split() == ["True", "False", "False"]
