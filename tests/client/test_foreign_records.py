"""What lies in a store beside the records, and records that are none: rollouts end as they should all the same."""

from __future__ import annotations

import os
import time
from pathlib import Path

from agentcore_rl_toolkit.client import RolloutClient, WatchSettings
from agentcore_rl_toolkit.contract import Outcome, new_session_id
from agentcore_rl_toolkit.errors import InvalidResultError
from scripted_runtime import ScriptedRuntime

from .conftest import MakeClient, script


def root_of(store_url: str) -> Path:
    return Path(store_url.removeprefix("file://"))


def litter(root: Path) -> None:
    """A circle, a FIFO that looks like a record, and 1,100 nested folders."""
    e = root / "exp"
    (e / "x").mkdir(parents=True)
    (e / "round").symlink_to(e)
    os.mkfifo(e / "x" / f"{new_session_id()}.json")
    fd = os.open(e, os.O_RDONLY)
    for _ in range(1100):
        os.mkdir("d", dir_fd=fd)
        deeper = os.open("d", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = deeper
    os.close(fd)


def test_rollouts_end_well_in_a_littered_directory(make_client: MakeClient, store_url: str) -> None:
    litter(root_of(store_url))
    client = make_client()
    items = client.map([script(run_s=0.2 * (n % 3), result={"n": n}) for n in range(12)], timeout=60)
    assert [item.result["n"] for item in items if item.result is not None] == list(range(12))
    os.system(f"rm -rf '{root_of(store_url)}/exp/d'")  # pytest's own removal is recursive


def test_a_fifo_in_the_place_of_a_record_harms_its_own_rollout_only(make_client: MakeClient, store_url: str) -> None:
    client = make_client(watch=WatchSettings(heartbeat_s=0.2, lost_after_s=1.0))
    session_id = new_session_id()
    folder = root_of(store_url) / "exp" / "i"
    folder.mkdir(parents=True)
    os.mkfifo(folder / f"{session_id}.json")
    blocked = client.submit(script(run_s=0.1, die_at_s=0.1), session_id, "i")
    began_s = time.monotonic()
    assert client.submit(script(run_s=0.1, result={"n": 1}), input_id="i").result(60)["n"] == 1
    assert blocked.exception(60) is not None
    assert blocked.outcome is Outcome.LOST
    assert time.monotonic() - began_s < 20


def test_a_sparse_record_of_a_terabyte_is_invalid_by_default(
    make_client: MakeClient, runtime: ScriptedRuntime, store_url: str
) -> None:
    client = make_client()
    future = client.invoke(script(hang=True), input_id="i")
    path = root_of(store_url) / future.result_key
    path.parent.mkdir(parents=True, exist_ok=True)  # its agent may not have written anything yet
    with open(path, "wb") as file:
        file.truncate(2**40)
    assert isinstance(future.exception(60), InvalidResultError)


def test_an_answer_that_names_an_impossible_record_is_invalid_at_once(client: RolloutClient, store_url: str) -> None:
    places = [("exp/s.json", "file:///a/../b"), ("exp/s.json", "no bucket")]
    places += [(key, store_url) for key in ("../../etc/x.json", "exp//s.json", "exp/\0.json", "e" * 2000, "")]
    replies = [{"status": "processing", "s3_bucket": bucket, "result_key": key} for key, bucket in places]
    beside = client.submit(script(run_s=0.3, result={"n": 1}))
    for future in [client.submit(script(reply=reply, run_s=60)) for reply in replies]:
        assert future.exception(60) is not None
        assert future.outcome is Outcome.INVALID
    assert beside.result(60)["n"] == 1


# ---- whose silence means what


def test_a_session_without_heartbeat_outlives_neighbours_that_have_one(make_client: MakeClient) -> None:
    """A mixed fleet: agents of the published toolkit, and one whose operator switched the heartbeat off, beside ours."""
    client = make_client(watch=WatchSettings(heartbeat_s=0.1, lost_after_s=0.6))
    lively = [client.submit(script(run_s=0.4, result={"n": n})) for n in range(3)]
    assert all(future.result(60)["n"] == n for n, future in enumerate(lively))  # now the client has seen life
    silent = [client.submit(script(run_s=1.8, heartbeat=False, result={"n": n})) for n in range(3)]
    beside = [client.submit(script(run_s=1.8, result={"n": n})) for n in range(3)]
    dead = client.submit(script(run_s=60, die_at_s=0.3))
    assert [future.result(30)["n"] for future in [*silent, *beside]] == [0, 1, 2, 0, 1, 2]
    assert dead.exception(60) is not None
    assert dead.outcome is Outcome.LOST
    assert client.stats["ok"] == 9
