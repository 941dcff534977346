"""Finds what the forks of a process would share and must not: two sessions would read each other's answers from it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat

from ..launcher import linux

_SQLITE = b"SQLite format 3\0"


def shared_by_forks(control: int) -> list[str]:
    """Describe this process's open connections, event loops, SQLite databases, and pipes to and from a child process.

    ``control`` is a descriptor to leave out. The system says less on macOS: connections and databases are found there.
    """
    found: list[str] = []
    pipes: dict[int, set[int]] = {os.O_RDONLY: set(), os.O_WRONLY: set(), os.O_RDWR: set()}
    children = linux.children()
    for fd in sorted(map(int, os.listdir("/dev/fd"))):
        if fd <= 2 or fd == control:
            continue
        with contextlib.suppress(OSError):  # the descriptor of the listing is closed
            kind = os.fstat(fd)
            access = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE
            if stat.S_ISSOCK(kind.st_mode):
                found += _connection(fd, bool(children))
            elif stat.S_ISFIFO(kind.st_mode):
                pipes[access].add(kind.st_ino)
            elif stat.S_ISREG(
                kind.st_mode
            ):  # SQLite itself forbids to use a connection after a fork; reading is harmless
                if access == os.O_RDWR and os.pread(fd, len(_SQLITE), 0) == _SQLITE:
                    found.append(f"the SQLite database {os.readlink(f'/dev/fd/{fd}')}")
            elif os.readlink(f"/dev/fd/{fd}") == "anon_inode:[eventpoll]":
                found.append("an event loop")
    reads, writes = pipes[os.O_RDONLY], pipes[os.O_WRONLY]
    if children and reads - writes and writes - reads:
        found.append("pipes to and from a child process")
    return found


def _connection(fd: int, has_children: bool) -> list[str]:
    with socket.socket(fileno=os.dup(fd)) as found:
        if found.family not in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX):
            return []
        try:
            peer = found.getpeername()
        except OSError:  # without a peer a socket of UDP still takes the answers to all sessions
            own = found.getsockname()
            is_udp = found.type == socket.SOCK_DGRAM and found.family != socket.AF_UNIX and own[1] != 0
            return [f"the UDP socket {_text(own)}"] if is_udp else []
        if found.type == socket.SOCK_STREAM:
            with contextlib.suppress(BlockingIOError):
                if not found.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                    return []  # the peer has closed it
        if peer:
            return [f"a connection to {_text(peer)}"]
        return ["a socket pair with a child process"] if has_children else []  # without one, this process has both ends


def _text(address: object) -> str:
    if isinstance(address, tuple):
        return f"[{address[0]}]:{address[1]}" if ":" in address[0] else f"{address[0]}:{address[1]}"
    text = os.fsdecode(address) if isinstance(address, bytes) else str(address)
    return text.replace("\0", "@")
