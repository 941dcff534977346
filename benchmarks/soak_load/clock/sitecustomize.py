"""Python imports this module at its start where this folder is in PYTHONPATH: `time.time` of the process is then off by what the
file SOAK_CLOCK says (seconds, read twice a second). `time.monotonic` and the machine's clock stay as they are.
"""

import os
import time

_FILE = os.environ.get("SOAK_CLOCK")
if _FILE is not None:
    _true, _true_ns, _monotonic = time.time, time.time_ns, time.monotonic
    _read_s, _off_s = -1.0, 0

    def _off() -> int:
        global _read_s, _off_s
        now_s = _monotonic()
        if now_s - _read_s > 0.5:
            _read_s = now_s
            try:
                with open(_FILE) as file:
                    _off_s = int(file.read() or 0)
            except OSError:
                pass
        return _off_s

    time.time = lambda: _true() + _off()
    time.time_ns = lambda: _true_ns() + _off() * 10**9
