"""Rows of data files: their payloads, their ids, and the place of a wrong one."""

from __future__ import annotations

import json
import math
import re
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from agentcore_rl_toolkit.client.data import encode_payload, numbered_rows, payload_id, read_rows
from agentcore_rl_toolkit.contract import check_id
from agentcore_rl_toolkit.errors import ConfigError


def test_every_field_of_a_row_is_the_payload(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"prompt": "1+1", "answer": "2", "tools": ["calc"]}\n\n{"question": "q"}\n')
    assert read_rows(path) == [{"prompt": "1+1", "answer": "2", "tools": ["calc"]}, {"question": "q"}]


def test_slimes_envelope_is_taken_off_but_a_metadata_field_of_a_payload_is_not(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    rows = [
        {"prompt": "p", "metadata": {"answer": "2"}},
        {"prompt": "p", "metadata": {"a": 1}, "answer": "2"},
        {"prompt": "p", "metadata": {"a": 1}, "label": "2"},
        {"prompt": "p", "metadata": "a text"},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_rows(path) == [{"prompt": "p", "answer": "2"}, rows[1], {"prompt": "p", "label": "2", "a": 1}, rows[3]]


def test_text_of_every_kind_survives_a_line_of_json(tmp_path: Path) -> None:
    rows = [{"idx": 0, "prompt": "a\u2028b\u2029c\u0085d\x1ce\rf\ng", "answer": "\ufeff1"}, {"idx": 1, "prompt": "q"}]
    (tmp_path / "x.jsonl").write_text("".join(encode_payload(row) + "\n" for row in rows), encoding="utf-8")
    assert read_rows(tmp_path / "x.jsonl") == rows


@pytest.mark.parametrize("value", [date(2026, 1, 2), Decimal("1.5"), b"ab", math.nan])
def test_a_value_that_no_agent_could_be_sent_is_named_when_the_file_is_read(tmp_path: Path, value: object) -> None:
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "x.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"a": 1, "when": value}]), path)
    with pytest.raises(ConfigError, match=r"x\.parquet:1: a payload must be plain JSON"):
        read_rows(path)


@pytest.mark.parametrize(
    ("name", "text", "error"),
    [
        ("x.jsonl", '{"a": 1}\n{oops\n', "x.jsonl:2: Expecting property name"),
        ("x.jsonl", "{}\n\n[1]\n", "x.jsonl:3: a row must be an object, got list"),
        ("x.json", '[{}, "b"]', "x.json:2: a row must be an object, got str"),
        ("x.json", "{oops", "x.json:1: Expecting property name"),
        ("x.ndjson", '{"_rollout": {}}\n', "x.ndjson:1: `_rollout` is written by the client"),
        ("x.jsonl", " \n\n", "x.jsonl has no rows"),
        ("x.txt", "{}", "x.txt: data files are .jsonl, .json or .parquet"),
        ("x.parquet", "{}", "x.parquet cannot be read as Parquet"),
    ],
)
def test_a_bad_row_is_named_by_its_line(tmp_path: Path, name: str, text: str, error: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=re.escape(error)):
        read_rows(tmp_path / name)


def test_a_json_file_is_a_list_of_rows_or_one_row(tmp_path: Path) -> None:
    for text in ('[{"a": 1}]', '\ufeff{"a": 1}'):
        (tmp_path / "x.json").write_text(text, encoding="utf-8")
        assert numbered_rows(tmp_path / "x.json") == [(1, {"a": 1})]


@pytest.mark.parametrize("value", ["Größe1", "٣٤", "x" * 300, 10**300, -(10**300), "a b", "", "a\n"])
def test_an_id_that_cannot_stand_in_a_key_gives_a_digest(value: object) -> None:
    found = payload_id({"id": value})
    assert len(found) == 20
    assert check_id(f"{found}-{2**31}-0000001", "input_id")
    assert found == payload_id({"id": value}) != payload_id({"id": f"{value}2"})


@pytest.mark.parametrize("field", ["id", "idx"])
@pytest.mark.parametrize("value", [0, 10**99 - 1, -(10**99) + 1, "a" * 99])
def test_an_id_of_the_payload_is_the_input_id_if_a_key_can_hold_it(field: str, value: Any) -> None:
    assert payload_id({field: value}) == str(value)
    longer = f"{value}a" if isinstance(value, str) else value * 10 or 10**99
    for unusable in (longer, True, "a/b"):
        assert payload_id({field: unusable}) != str(unusable)
