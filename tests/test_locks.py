"""A forked child that outlives its parent does not keep the parent's locks."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from pathlib import Path

import pytest

from agentcore_rl_toolkit.errors import ConfigError
from agentcore_rl_toolkit.gateway.store.writer import Store
from agentcore_rl_toolkit.runs.folder import LOCK, locked, read_metrics
from agentcore_rl_toolkit.runtime.roots import own_state


def store(folder: Path) -> AbstractContextManager[Store]:
    return closing(Store(folder))


def state(folder: Path) -> AbstractContextManager[object]:
    return own_state(folder).file


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize("hold", [locked, store, state])
def test_the_lock_ends_with_its_owner_although_a_forked_child_lives(
    hold: Callable[[Path], AbstractContextManager[object]], tmp_path: Path
) -> None:
    def is_refused() -> bool:
        try:
            with hold(tmp_path):
                return False
        except ConfigError as e:
            return "in use" in str(e)

    (ready, tell_ready), (go, tell_go) = os.pipe(), os.pipe()
    with hold(tmp_path):
        child = os.fork()
        if not child:
            os.close(tell_go)
            os.write(tell_ready, b"y" if is_refused() else b"n")
            os.read(go, 1)
            os._exit(0)
        owned = os.read(ready, 1)
    try:
        assert owned == b"y"
        assert not is_refused()
    finally:
        os.close(tell_go)
        os.waitpid(child, 0)
        for fd in (ready, tell_ready, go):
            os.close(fd)


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_child_does_not_write_to_the_run_that_it_leaves(tmp_path: Path) -> None:
    child = None
    try:
        with locked(tmp_path):
            child = os.fork()
            if not child:
                raise RuntimeError("an error of the child")
            assert os.waitpid(child, 0)[1] == 0
            assert (tmp_path / LOCK).read_text().startswith(f"{os.getpid()} ")
    except RuntimeError:
        os._exit(0)
    finally:
        if not child:
            os._exit(1)
    assert read_metrics(tmp_path) == []
