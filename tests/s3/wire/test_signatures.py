"""Signatures over real requests: accepted, and refused with S3's codes."""

from __future__ import annotations

import hashlib
import http.client
import time
import urllib.parse
from collections.abc import Callable
from typing import Any

import pytest
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from ..cases import fetch, refused
from ..conftest import ACCESS, SECRET, Server, client_for


@pytest.mark.parametrize(
    ("access", "secret", "code"),
    [(ACCESS, "wrong", "SignatureDoesNotMatch"), ("AKIDOTHER", SECRET, "InvalidAccessKeyId")],
)
def test_wrong_keys(server: Server, bucket: str, access: str, secret: str, code: str) -> None:
    client = client_for(server.url, access, secret)
    assert refused(lambda: client.list_objects_v2(Bucket=bucket)) == (code, 403)
    client.close()


def test_unsigned_requests_are_refused_where_keys_are_set(server: Server, bucket: str) -> None:
    status, body = fetch(f"{server.url}/{bucket}/k")
    assert status == 403
    assert b"<Code>AccessDenied</Code>" in body


def test_unsigned_requests_are_served_where_none_are(start_server: Callable[..., Server]) -> None:
    open_server = start_server("--bucket", "open")
    assert fetch(f"{open_server.url}/open/k", "PUT", b"x")[0] == 200
    assert fetch(f"{open_server.url}/open/k") == (200, b"x")


@pytest.mark.parametrize("version", ["s3v4", None])
def test_presigned_urls_of_both_versions(server: Server, bucket: str, version: str | None) -> None:
    """boto3 by itself presigns with version 2 in most regions."""
    client = client_for(server.url, signature_version=version)
    presigned = client.generate_presigned_url("get_object", Params={"Bucket": bucket, "Key": "k"})
    assert ("AWSAccessKeyId=" in presigned) is (version is None)
    params = {"Bucket": bucket, "Key": "a b/é"}
    put = client.generate_presigned_url(
        "put_object", Params={**params, "ContentType": "text/x", "Metadata": {"k": "v"}}
    )
    headers = {"Content-Type": "text/x", "x-amz-meta-k": "v"}
    assert fetch(put, "PUT", b"body", headers)[0] == 200
    get = client.generate_presigned_url("get_object", Params={**params, "ResponseContentType": "text/y"})
    assert fetch(get) == (200, b"body")
    tampered = get.replace("text%2Fy", "text%2Fz")
    assert tampered != get
    assert fetch(tampered)[0] == 403
    assert client.head_object(Bucket=bucket, Key="a b/é")["Metadata"] == {"k": "v"}
    client.close()


@pytest.mark.parametrize("version", ["s3v4", "s3"])
@pytest.mark.parametrize("keys", [True, False])
def test_presigned_urls_expire(
    server: Server, bucket: str, start_server: Callable[..., Server], version: str, keys: bool
) -> None:
    where = server if keys else start_server("--bucket", bucket)
    client = client_for(where.url, signature_version=version)
    url = client.generate_presigned_url("get_object", Params={"Bucket": bucket, "Key": "k"}, ExpiresIn=1)
    time.sleep(2.1)
    status, body = fetch(url)
    assert status == 403
    assert b"Request has expired" in body
    client.close()


def signed(method: str, url: str, body: bytes, headers: dict[str, str], when: str | None = None) -> dict[str, str]:
    """Headers of a request signed by botocore, optionally as if made at another time."""
    request = AWSRequest(method, url, data=body, headers=headers)
    auth = S3SigV4Auth(Credentials(ACCESS, SECRET), "s3", "us-east-1")
    if when is None:
        auth.add_auth(request)
    else:
        request.context["timestamp"] = when
        request.headers["X-Amz-Date"] = when
        request.headers["X-Amz-Content-SHA256"] = hashlib.sha256(body).hexdigest()
        text = auth.string_to_sign(request, auth.canonical_request(request))
        request.headers["Authorization"] = f"AWS4-HMAC-SHA256 Credential={auth.scope(request)}, SignedHeaders=" + (
            f"{auth.signed_headers(auth.headers_to_sign(request))}, Signature={auth.signature(text, request)}"
        )
    return dict(request.headers.items())


def signed_as(payload: str, method: str, url: str, headers: dict[str, str]) -> dict[str, str]:
    """Headers of a request signed by botocore over another payload's hash."""

    class Auth(S3SigV4Auth):
        def payload(self, request: AWSRequest) -> str:
            return payload

    request = AWSRequest(method, url, headers=headers)
    Auth(Credentials(ACCESS, SECRET), "s3", "us-east-1").add_auth(request)
    return dict(request.headers.items())


def send(url: str, method: str, body: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
    parts = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=20)
    try:
        connection.request(method, parts.path + (f"?{parts.query}" if parts.query else ""), body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_an_old_signature_is_refused(server: Server, bucket: str) -> None:
    url = f"{server.url}/{bucket}/k"
    status, body = send(url, "GET", b"", signed("GET", url, b"", {}, "20240101T000000Z"))
    assert status == 403
    assert b"<Code>RequestTimeTooSkewed</Code>" in body


def test_a_body_other_than_the_signed_one_is_refused_and_not_stored(server: Server, bucket: str, s3: Any) -> None:
    url = f"{server.url}/{bucket}/k"
    headers = signed("PUT", url, b"right", {"x-amz-content-sha256": hashlib.sha256(b"right").hexdigest()})
    status, body = send(url, "PUT", b"wrong", headers)
    assert status == 400
    assert b"<Code>XAmzContentSHA256Mismatch</Code>" in body
    assert s3.list_objects_v2(Bucket=bucket)["KeyCount"] == 0


def test_an_unsigned_amz_header_is_refused(server: Server, bucket: str) -> None:
    url = f"{server.url}/{bucket}/k"
    headers = {**signed("PUT", url, b"x", {}), "x-amz-meta-added": "later"}
    assert send(url, "PUT", b"x", headers)[0] == 403


def test_a_body_of_signed_chunks_is_refused_by_name(server: Server, bucket: str, s3: Any) -> None:
    url = f"{server.url}/{bucket}/k"
    kind = "STREAMING-AWS4-HMAC-SHA256-PAYLOAD"
    body = b"1;chunk-signature=" + b"0" * 64 + b"\r\nx\r\n0;chunk-signature=" + b"0" * 64 + b"\r\n\r\n"
    wanted = {"x-amz-content-sha256": kind, "content-encoding": "aws-chunked", "x-amz-decoded-content-length": "1"}
    headers = signed_as(kind, "PUT", url, wanted)
    status, answer = send(url, "PUT", body, headers)
    assert (status, b"chunks are signed" in answer) == (501, True)
    assert s3.list_objects_v2(Bucket=bucket)["KeyCount"] == 0
