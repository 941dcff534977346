"""Store URLs and allow-lists."""

from __future__ import annotations

import pytest

from agentcore_rl_toolkit.errors import ConfigError
from agentcore_rl_toolkit.store import open_store, parse_url, url_matches


@pytest.mark.parametrize(
    ("url", "canonical"),
    [
        ("my-bucket", "s3://my-bucket"),
        ("s3://my-bucket", "s3://my-bucket"),
        ("S3://my-bucket/a//b/", "s3://my-bucket/a/b"),
        ("file:///tmp/x/", "file:///tmp/x"),
        ("file:///", "file:///"),
        ("file://localhost/tmp/x", "file:///tmp/x"),
        ("file:///tmp/a%20b", "file:///tmp/a%20b"),
        ("file:///tmp/a b", "file:///tmp/a%20b"),
        ("memory://", "memory://"),
        ("memory://t/p", "memory://t/p"),
    ],
)
def test_a_url_has_one_canonical_form(url: str, canonical: str) -> None:
    assert str(parse_url(url)) == canonical
    assert str(parse_url(canonical)) == canonical


@pytest.mark.parametrize(
    "bad",
    [
        *("", "a", "/tmp/x", "./x", "a/b", "file://tmp/x", "file://", "file:///a/../b", "s3://", "s3://b", "s3:///p"),
        *("s3://bucket/../x", "gs://x/y", "http://host/x", "bucket name", "bucket\n", "file:///a\0b", None, 5, ["b"]),
    ],
)
def test_what_cannot_be_a_store_is_refused(bad: object) -> None:
    with pytest.raises(ConfigError):
        open_store(bad)  # type: ignore[arg-type]  # the name may come from a request


@pytest.mark.parametrize(
    ("url", "patterns", "allowed"),
    [
        ("results", ["results"], True),
        ("s3://results", ["results"], True),
        ("s3://results/team/run", ["results"], True),
        ("results", ["s3://results/team"], False),
        ("s3://results/team", ["s3://results/team"], True),
        ("s3://results/team/run", ["s3://results/team/"], True),
        ("s3://results/teams", ["s3://results/team"], False),
        ("results-evil", ["results"], False),
        ("results-eu", ["results-*"], True),
        ("other", ["results", "results-*"], False),
        ("file:///data/run", ["file:///data"], True),
        ("file:///database", ["file:///data"], False),
        ("file:///etc", ["results"], False),
        ("memory://x", ["memory://*"], True),
        ("results", [], False),
        ("results", ["", " results "], True),
        ("resultsX", ["result[s]*"], False),
        ("s3://other/results-eu", ["*/results-eu"], True),
        ("s3://other/x/results-eu", ["*/results-eu"], False),
        ("s3://results-a/b", ["s3://results-*/b"], True),
        ("s3://results-a/x/b", ["s3://results-*/b"], False),
        ("file:///data/a b", ["file:///data/a b"], True),
        ("s3://results-a/b\nc", ["s3://results-*"], True),
    ],
)
def test_allow_lists_cover_what_lies_below_and_nothing_beside(url: str, patterns: list[str], allowed: bool) -> None:
    assert url_matches(url, patterns) is allowed


def test_an_allow_list_that_cannot_be_read_is_an_error_and_no_open_door() -> None:
    with pytest.raises(ConfigError):
        url_matches("results", ["result[s]"])


def test_memory_is_shared_by_name() -> None:
    open_store("memory://shared-one").put("k", b"1")
    assert open_store("memory://shared-one").get("k") == b"1"
    assert open_store("memory://shared-two").list() == []
    open_store("memory://shared-one/p").put("k", b"2")
    assert [o.key for o in open_store("memory://shared-one").list()] == ["k", "p/k"]
