"""The same cases against our endpoint and against moto, with unmodified boto3."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .cases import CASES, Case
from .conftest import new_bucket_name

NAMED = [pytest.param(c, id=c.name) for c in CASES]


def run(case: Case, client: Any) -> Any:
    bucket = new_bucket_name()
    client.create_bucket(Bucket=bucket)
    return case.run(client, bucket)


@pytest.mark.parametrize("case", NAMED)
def test_our_endpoint_answers_as_s3_does(case: Case, s3: Any) -> None:
    assert run(case, s3) == case.expected


@pytest.mark.parametrize("case", NAMED)
def test_moto_agrees_or_differs_as_listed(case: Case, moto_s3: Any) -> None:
    assert run(case, moto_s3) == case.moto


def test_every_difference_from_moto_is_in_the_documentation() -> None:
    text = (Path(__file__).parents[2] / "docs" / "s3.md").read_text()
    for case in CASES:
        if case.moto != case.expected:
            assert f"`{case.name}`" in text, f"docs/s3.md does not list {case.name}"
