"""Documents in: what is none is refused, whatever it is."""

from __future__ import annotations

import pytest

from agentcore_rl_toolkit.s3.wire.errors import S3Error
from agentcore_rl_toolkit.s3.wire.xml import parse

ENTITIES = '<?xml version="1.0" encoding="utf-16"?><!DOCTYPE x [<!ENTITY a "b">]><Delete><Key>&a;</Key></Delete>'


@pytest.mark.threat(
    who="a caller with a bad request",
    tries="XML of 100,000 levels, in another encoding, or with a document type, to the S3 endpoint",
    stopped_by="documents are read as UTF-8, without document types, and not by recursion; the answer is 400",
    leaves="",
)
@pytest.mark.parametrize(
    "body",
    [
        b"<Delete>" * 100_000,
        b"<a>" * 100_000 + b"</a>" * 100_000,
        ENTITIES.encode("utf-16"),
        b'<?xml version="1.0" encoding="utf-7"?><Delet',
        b'<?xml version="1.0" encoding="nonsense"?><Delet',
        b"<Delete>&#xD800;</Delete>",
        b"<Delete>\xed\xa0\x80</Delete>",
        b"\xff\xfe\x00",
        b"",
    ],
)
def test_what_is_no_document_is_refused(body: bytes) -> None:
    with pytest.raises(S3Error) as caught:
        parse(body, "Delete")
    assert (caught.value.code, caught.value.status) == ("MalformedXML", 400)


def test_a_deep_document_is_read_without_recursion() -> None:
    tree = parse(b"<Delete>" + b"<a>" * 100_000 + b"</a>" * 100_000 + b"</Delete>", "Delete")
    assert tree.findtext("Object") is None
