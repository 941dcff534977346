"""Runs Bubblewrap with a user namespace that has the same users as this one. Root runs this file as a script.

Root in a user namespace has no rights over processes and file systems outside. The namespace that Bubblewrap makes by itself has
one user: files of other users would be closed to root.
"""

import json
import os
import signal
import sys
from pathlib import Path


def main(words: list[str]) -> None:
    """Become `bwrap` with these words."""
    info, info_out = os.pipe()
    ready_in, ready = os.pipe()
    if os.fork() == 0:
        if os.fork() == 0:  # no child of Bubblewrap
            os.close(info_out)
            started = os.fdopen(info).read()
            for name in ("uid_map", "gid_map") if started else ():
                ranges = [line.split() for line in Path("/proc/self", name).read_text().splitlines()]
                same = "".join(f"{first} {first} {count}\n" for first, _, count in ranges)
                Path(f"/proc/{json.loads(started)['child-pid']}/{name}").write_text(same)
            os.write(ready, b"x")
        os._exit(0)
    os.wait()
    for fd in (info_out, ready_in):
        os.set_inheritable(fd, True)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and programs inherit that
    namespace = ["--unshare-user", "--info-fd", str(info_out), "--userns-block-fd", str(ready_in)]
    os.execvp("bwrap", ["bwrap", *namespace, *words])


if __name__ == "__main__":
    main(sys.argv[1:])
