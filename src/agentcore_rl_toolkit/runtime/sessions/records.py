"""Takes the records of this machine's sessions and puts them into ``file://`` stores: no session may write there itself.

Theory of operation. One unix socket serves all sessions. The kernel says which process connected, and the node to which session
it belongs; the session's caller has named the record it is to write (`grants`). A record is written once and never replaced, a
heartbeat is replaced and deleted. The bytes go from the socket to an unfinished file beside the target, which is moved into
place when all is there, so a session that ends in the middle leaves nothing. Steps below the store's directory follow no link.

Source of the wire form: `agentcore_rl_toolkit.store.handover`.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import os
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, TypeVar

from ..._servers.peers import peer_pid
from ...errors import AgentCoreRLError, ObjectExistsError, ObjectNotFoundError, StorePermissionError
from ...store import open_store, parse_url
from ...store.handover import LINE_BYTES, NO_SESSION, NOT_YOURS
from ...store.local_files import MAX_DEPTH
from ...store.names import TEMP_PREFIX, path_of
from .grants import Grant, allows, is_record

log = logging.getLogger(__name__)
T = TypeVar("T")
VARIABLE = "AGENTCORE_RL_RECORDS"  # in a session's environment: the socket's path
MAX_RECORD_BYTES = 256 * 2**20
MAX_HEARTBEAT_BYTES = 64 * 1024
PIECE_BYTES = 2**20
PAUSE_S = 60.0  # of a session within one request
AT_ONCE = 8  # connections of one session
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_TRANSIENT = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EIO,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
    errno.ESTALE,
    errno.EAGAIN,
}


class Writer(Protocol):
    """A session as its node knows it.

    ``own_directories``: those that it can write to without the runtime, beside its own folder; None where nothing confines it.
    """

    grants: list[Grant]

    @property
    def own_directories(self) -> Sequence[Path] | None: ...


class Records:
    """The socket at ``path`` and what arrives there. ``writer_of``: the session that a process of this machine belongs to."""

    def __init__(self, path: Path, writer_of: Callable[[int], Writer | None]) -> None:
        self.path = path
        self._writer_of = writer_of
        self._server: asyncio.Server | None = None
        self._busy: dict[int, int] = {}  # connections by session
        self._tasks: set[asyncio.Task[None]] = set()
        self._threads = ThreadPoolExecutor(8, thread_name_prefix="records")
        # Apart: a busy disk takes seconds to sync a record, and a heartbeat that waits for that is a session that looks dead.
        self._syncing = ThreadPoolExecutor(8, thread_name_prefix="records-sync")

    async def start(self) -> None:
        """Listen. The folder around keeps other users out; a container's user may be another one than this."""
        self._server = await asyncio.start_unix_server(self._serve, str(self.path), limit=LINE_BYTES)
        self.path.chmod(0o666)

    async def aclose(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for threads in (self._threads, self._syncing):
            threads.shutdown(wait=False)
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        pid = peer_pid(writer.get_extra_info("socket"))
        session = self._writer_of(pid) if pid else None
        busy = id(session)
        try:
            if session is None:
                await _answer(writer, error=NO_SESSION, message="no session that this runtime knows is calling")
                return
            self._busy[busy] = self._busy.get(busy, 0) + 1
            if self._busy[busy] > AT_ONCE:
                await _answer(writer, error="transient", message=f"more than {AT_ONCE} requests of one session at once")
                return
            await self._request(session, reader, writer)
        except (TimeoutError, ConnectionError, asyncio.IncompleteReadError, ValueError, RecursionError, AttributeError):
            return  # it went away, or sent nothing that can be read
        finally:
            if session is not None:
                self._busy[busy] -= 1
                if not self._busy[busy]:
                    del self._busy[busy]
            self._tasks.discard(task)
            writer.close()

    async def _request(self, session: Writer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(PAUSE_S):
            asked: dict[str, Any] = json.loads(await reader.readline())
        op, key, size = str(asked.get("op")), str(asked.get("key")), asked.get("size")
        url = parse_url(str(asked.get("store")))
        if url.scheme != "file" or not allows(session.grants, str(url), key):
            direct = url.scheme == "file" and _has(session, url.prefix)
            message = "the session's caller did not ask for this object"
            await _answer(writer, error=NOT_YOURS, direct=direct, message=message)
            return
        try:
            if op == "put":
                most = MAX_RECORD_BYTES if is_record(key) else MAX_HEARTBEAT_BYTES
                if not isinstance(size, int) or not 0 <= size <= most:
                    await _answer(writer, error="other", message=f"it may have {most} bytes at most")
                    return
                once = is_record(key) or bool(asked.get("create_only"))
                await self._put(url.prefix, key, size, once, bool(asked.get("durable", True)), reader, writer)
                await _answer(writer)
            elif op == "get":
                limit = asked.get("max_bytes")
                limit = limit if isinstance(limit, int) else MAX_RECORD_BYTES
                body = await open_store(str(url)).get_async(key, max_bytes=limit)
                await _answer(writer, body, size=len(body))
            elif op == "head":
                info = await open_store(str(url)).head_async(key)
                await _answer(writer, size=info.size, modified_s=info.last_modified_s, etag=info.etag)
            elif op == "delete" and not is_record(key):
                await self._in_thread(_delete, url.prefix, _parts(key))
                await _answer(writer)
            else:
                await _answer(writer, error="permission", message=f"a session may not {op} a record")
        except (OSError, AgentCoreRLError) as e:
            if not isinstance(e, (TimeoutError, ConnectionError)):
                await _answer(writer, error=_kind(e), message=str(e))

    async def _put(
        self,
        root: str,
        key: str,
        size: int,
        once: bool,
        durable: bool,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        threads = self._syncing if durable else self._threads
        folder, file, unfinished = await self._in_thread(_begin, root, _parts(key), threads=threads)
        try:
            await _answer(writer, go_on=True)
            left = size
            while left:
                async with asyncio.timeout(PAUSE_S):
                    piece = await reader.readexactly(min(left, PIECE_BYTES))
                await self._in_thread(_write_all, file, piece, threads=threads)
                left -= len(piece)
            name = _parts(key)[-1]
            await self._in_thread(_finish, folder, file, unfinished, name, once, durable, threads=threads)
        finally:
            os.close(file)
            with contextlib.suppress(OSError):
                os.unlink(unfinished, dir_fd=folder)  # it is gone when it has its name
            os.close(folder)

    async def _in_thread(self, work: Callable[..., T], *args: Any, threads: ThreadPoolExecutor | None = None) -> T:
        return await asyncio.get_running_loop().run_in_executor(threads or self._threads, work, *args)


async def _answer(writer: asyncio.StreamWriter, body: bytes = b"", **answer: Any) -> None:
    writer.write(json.dumps(answer).encode() + b"\n" + body)
    async with asyncio.timeout(PAUSE_S):
        await writer.drain()


def _has(session: Writer, directory: str) -> bool:
    """Whether what a session writes to a directory by itself gets there."""
    if session.own_directories is None:
        return True
    real = os.path.realpath(directory)
    return any(Path(real).is_relative_to(os.path.realpath(own)) for own in session.own_directories)


def _kind(e: OSError | AgentCoreRLError) -> str:
    if isinstance(e, (FileExistsError, ObjectExistsError)):
        return "exists"
    if isinstance(e, (FileNotFoundError, ObjectNotFoundError)):
        return "missing"
    if isinstance(e, (PermissionError, StorePermissionError)) or getattr(e, "errno", None) in (
        errno.EROFS,
        errno.ELOOP,
    ):
        return "permission"
    return "transient" if getattr(e, "errno", None) in _TRANSIENT else "other"


def _parts(key: str) -> list[str]:
    """The folders and the file of a key. Raises: ValueError on one that leads elsewhere."""
    parts = path_of(key).split("/")
    if len(parts) > MAX_DEPTH or any(p in ("", ".", "..") or "\0" in p or p.startswith(TEMP_PREFIX) for p in parts):
        raise ValueError(f"{key!r} is no key of a record")
    return parts


def _open_folder(root: str, parts: Sequence[str], *, make: bool) -> int:
    """The folder of an object. Raises: OSError, also where a link stands in the way."""
    if make:
        os.makedirs(root, exist_ok=True)
    fd = os.open(root, _FOLDER)  # the store's own directory is its owner's word and may be a link
    for part in parts:
        above = fd
        try:
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, dir_fd=above)
                    os.fsync(above)
            fd = os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=above)
        finally:
            os.close(above)
    return fd


def _begin(root: str, parts: Sequence[str]) -> tuple[int, int, str]:
    folder = _open_folder(root, parts[:-1], make=True)
    unfinished = f"{TEMP_PREFIX}{secrets.token_hex(8)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return folder, os.open(unfinished, flags, 0o644, dir_fd=folder), unfinished
    except BaseException:
        os.close(folder)
        raise


def _write_all(file: int, piece: bytes) -> None:
    view = memoryview(piece)
    while view:
        view = view[os.write(file, view) :]


def _finish(folder: int, file: int, unfinished: str, name: str, once: bool, durable: bool) -> None:
    if durable:
        os.fsync(file)
    if once:
        os.link(unfinished, name, src_dir_fd=folder, dst_dir_fd=folder)
        os.unlink(unfinished, dir_fd=folder)
    else:
        os.rename(unfinished, name, src_dir_fd=folder, dst_dir_fd=folder)
    if durable:
        os.fsync(folder)


def _delete(root: str, parts: Sequence[str]) -> None:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        folder = _open_folder(root, parts[:-1], make=False)
        try:
            os.unlink(parts[-1], dir_fd=folder)
        finally:
            os.close(folder)
