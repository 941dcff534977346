"""Ask a gateway for its health without a pause, until the standard input ends.

    python -m gateway_load.probe HOST PORT

Prints the waits as a JSON list. Units: ms. It is a process, so that the load does not share its interpreter's lock. Time in
which this process was ready to run and had no core does not count, nor does time that the hypervisor gave to others.
"""

from __future__ import annotations

import json
import operator
import os
import select
import socket
import sys
import time
from pathlib import Path

EVERY_S = 0.001
_REQUEST = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n"


def _waited_ms() -> float:
    """Return the time in which this process waited for a core."""
    return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e6


def _stolen_ms() -> list[float]:
    """Return the time that the hypervisor took from each core."""
    cores = Path("/proc/stat").read_text().split("cpu")[2:]
    return [1000 * int(core.split()[8]) / os.sysconf("SC_CLK_TCK") for core in cores]


def main() -> None:
    waits_ms: list[float] = []
    with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as connection:
        while not select.select([sys.stdin], [], [], EVERY_S)[0]:
            stolen_ms, waited_ms, began_s = _stolen_ms(), _waited_ms(), time.perf_counter()
            connection.sendall(_REQUEST)
            if not connection.recv(2**16):
                raise SystemExit("the gateway closed the connection")
            took_ms = (time.perf_counter() - began_s) * 1000 - (_waited_ms() - waited_ms)
            waits_ms.append(took_ms - max(map(operator.sub, _stolen_ms(), stolen_ms)))
    print(json.dumps(waits_ms))


if __name__ == "__main__":
    main()
