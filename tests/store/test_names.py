"""Keys as paths: reversible, and no path leaves its folder."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from agentcore_rl_toolkit.store import open_store
from agentcore_rl_toolkit.store.names import NAME_BYTES, path_of, text_of

part = st.one_of(
    st.text(min_size=1, max_size=30),
    st.text(st.sampled_from("%.25EF-tmp/\t日"), min_size=1, max_size=12),
    st.integers(230, 300).flatmap(lambda n: st.text(st.sampled_from("ab.%日"), min_size=n, max_size=n + 9)),
)
keys = (
    st.lists(part, min_size=1, max_size=3)
    .map("/".join)
    .filter(lambda key: not {"", ".", ".."} & set(key.split("/")) and "\0" not in key)
)


def key_of(path: str) -> str | None:
    """The key that a path stands for."""
    key = ""
    for name in path.split("/"):
        found = text_of(name)
        if found is None:
            return None
        key += found[0] + ("" if found[1] else "/")
    return key[:-1]


@given(keys)
def test_a_path_gives_its_key_back_and_each_name_fits(key: str) -> None:
    path = path_of(key)
    assert key_of(path) == key
    for name in path.split("/"):
        assert 0 < len(name.encode()) <= NAME_BYTES
        assert name not in (".", "..")
        assert not name.startswith(".tmp-")
        assert not any(ord(c) < 32 or 127 <= ord(c) < 160 for c in name)


@given(keys, keys)
def test_different_keys_have_different_paths(one: str, other: str) -> None:
    assert (path_of(one) == path_of(other)) == (one == other)


def test_files_that_no_key_stands_for_are_not_listed(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}")
    store.put("exp/50%.json", b"1")
    for name in ("100%.json", "%41.json", "%FF.json", "%e9.json"):
        (tmp_path / "exp" / name).write_bytes(b"foreign")
    (tmp_path / "exp" / "25%").mkdir()
    (tmp_path / "exp" / "25%" / "x.json").write_bytes(b"foreign")
    assert [o.key for o in store.list("exp/")] == ["exp/50%.json"]
