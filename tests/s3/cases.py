"""What S3 answers, case by case. Each case runs against our endpoint and against moto; both must give ``expected``.

Where moto gives something else, ``moto`` holds what it gives, and the difference is listed in docs/s3.md.
"""

from __future__ import annotations

import hashlib
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from botocore.exceptions import ClientError

SAME = object()
MIB = 2**20


@dataclass(frozen=True)
class Case:
    name: str
    run: Callable[[Any, str], Any]
    expected: Any
    moto: Any


CASES: list[Case] = []


def case(expected: Any, *, moto: Any = SAME) -> Callable[[Callable[[Any, str], Any]], Callable[[Any, str], Any]]:
    def register(run: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
        CASES.append(Case(run.__name__, run, expected, expected if moto is SAME else moto))
        return run

    return register


def refused(call: Callable[[], Any]) -> tuple[str, int]:
    """Code and status of the error that a call ends in."""
    try:
        call()
    except ClientError as e:
        return e.response["Error"]["Code"], e.response["ResponseMetadata"]["HTTPStatusCode"]
    return "accepted", 200


def fill(c: Any, b: str, *keys: str) -> None:
    for key in keys:
        c.put_object(Bucket=b, Key=key, Body=key.encode())


def keys_of(answer: Any) -> list[str]:
    return [o["Key"] for o in answer.get("Contents", [])]


def prefixes_of(answer: Any) -> list[str]:
    return [p["Prefix"] for p in answer.get("CommonPrefixes", [])]


# --- one object --------------------------------------------------------------------------------------------------------------


@case((b'{"x":1}', "application/json", {"k": "v", "long-name": "a b"}, 7))
def put_then_get_gives_body_type_and_metadata(c: Any, b: str) -> Any:
    c.put_object(
        Bucket=b,
        Key="a/b.json",
        Body=b'{"x":1}',
        ContentType="application/json",
        Metadata={"k": "v", "Long-Name": "a b"},
    )
    got = c.get_object(Bucket=b, Key="a/b.json")
    return got["Body"].read(), got["ContentType"], got["Metadata"], got["ContentLength"]


@case('"' + hashlib.md5(b"abc").hexdigest() + '"')
def etag_is_the_md5_in_quotes(c: Any, b: str) -> Any:
    return c.put_object(Bucket=b, Key="k", Body=b"abc")["ETag"]


@case(("binary/octet-stream", 0, b""))
def empty_object_without_type(c: Any, b: str) -> Any:
    c.put_object(Bucket=b, Key="k")
    got = c.get_object(Bucket=b, Key="k")
    return got["ContentType"], got["ContentLength"], got["Body"].read()


@case(("no-store", 'attachment; filename="x"', "gzip", "de"))
def system_headers_come_back(c: Any, b: str) -> Any:
    c.put_object(
        Bucket=b,
        Key="k",
        Body=b"x",
        CacheControl="no-store",
        ContentDisposition='attachment; filename="x"',
        ContentEncoding="gzip",
        ContentLanguage="de",
    )
    h = c.head_object(Bucket=b, Key="k")
    return h["CacheControl"], h["ContentDisposition"], h["ContentEncoding"], h["ContentLanguage"]


@case(("NoSuchKey", 404))
def get_of_a_missing_key(c: Any, b: str) -> Any:
    return refused(lambda: c.get_object(Bucket=b, Key="no"))


@case(("404", 404))
def head_of_a_missing_key(c: Any, b: str) -> Any:
    return refused(lambda: c.head_object(Bucket=b, Key="no"))


@case(("NoSuchBucket", 404))
def get_from_a_missing_bucket(c: Any, b: str) -> Any:
    return refused(lambda: c.get_object(Bucket=b + "-no", Key="k"))


@case(("NoSuchBucket", 404))
def put_into_a_missing_bucket(c: Any, b: str) -> Any:
    return refused(lambda: c.put_object(Bucket=b + "-no", Key="k", Body=b"x"))


@case((204, 204))
def delete_of_a_missing_key_succeeds(c: Any, b: str) -> Any:
    fill(c, b, "k")
    return tuple(c.delete_object(Bucket=b, Key="k")["ResponseMetadata"]["HTTPStatusCode"] for _ in range(2))


@case(b"second")
def put_replaces(c: Any, b: str) -> Any:
    c.put_object(Bucket=b, Key="k", Body=b"first, longer")
    c.put_object(Bucket=b, Key="k", Body=b"second")
    return c.get_object(Bucket=b, Key="k")["Body"].read()


@case((b"1", b"2", ["d", "d/e"]))
def a_key_may_be_the_prefix_of_another(c: Any, b: str) -> Any:
    c.put_object(Bucket=b, Key="d", Body=b"1")
    c.put_object(Bucket=b, Key="d/e", Body=b"2")
    read = [c.get_object(Bucket=b, Key=k)["Body"].read() for k in ("d", "d/e")]
    return read[0], read[1], keys_of(c.list_objects_v2(Bucket=b))


@case(True)
def odd_keys_come_back_as_they_were(c: Any, b: str) -> Any:
    names = [
        "exp id/ünï+cødé=1/a&b#c?.json",
        "日本/語.json",
        "a//b",
        "%41",
        "a+b c",
        "q'\"<>&",
        "dir/",
        "~-._",
        "\U0001f600",
    ]
    fill(c, b, *names)
    found = keys_of(c.list_objects_v2(Bucket=b))
    return found == sorted(names) and all(c.get_object(Bucket=b, Key=k)["Body"].read() == k.encode() for k in names)


@case(True)
def dots_in_keys_are_only_characters(c: Any, b: str) -> Any:
    names = ["a/../b", "../../etc/passwd", "a/./b", ".hidden", "..", "a/.."]
    fill(c, b, *names)
    return keys_of(c.list_objects_v2(Bucket=b)) == sorted(names)


@case(b"long")
def a_key_of_1024_bytes(c: Any, b: str) -> Any:
    key = "é" * 512
    c.put_object(Bucket=b, Key=key, Body=b"long")
    return c.get_object(Bucket=b, Key=key)["Body"].read()


@case(("KeyTooLongError", 400), moto=("accepted", 200))
def a_key_of_1025_bytes(c: Any, b: str) -> Any:
    return refused(lambda: c.put_object(Bucket=b, Key="k" * 1025, Body=b"x"))


@case(("MetadataTooLarge", 400), moto=("accepted", 200))
def metadata_over_2_kilobytes(c: Any, b: str) -> Any:
    return refused(lambda: c.put_object(Bucket=b, Key="k", Body=b"x", Metadata={"m": "x" * 2049}))


@case(("text/x", "no-cache"))
def response_headers_can_be_overridden(c: Any, b: str) -> Any:
    fill(c, b, "k")
    got = c.get_object(Bucket=b, Key="k", ResponseContentType="text/x", ResponseCacheControl="no-cache")
    return got["ContentType"], got["CacheControl"]


# --- ranges and conditions ---------------------------------------------------------------------------------------------------


@case(
    [
        (206, b"123", "bytes 1-3/10"),
        (206, b"789", "bytes 7-9/10"),
        (206, b"89", "bytes 8-9/10"),
        (206, b"0123456789", "bytes 0-9/10"),
    ]
)
def ranges(c: Any, b: str) -> Any:
    c.put_object(Bucket=b, Key="k", Body=b"0123456789")
    out = []
    for r in ("bytes=1-3", "bytes=7-", "bytes=-2", "bytes=0-99"):
        got = c.get_object(Bucket=b, Key="k", Range=r)
        out.append((got["ResponseMetadata"]["HTTPStatusCode"], got["Body"].read(), got["ContentRange"]))
    return out


@case([("InvalidRange", 416), ("InvalidRange", 416)])
def ranges_past_the_end_and_of_nothing(c: Any, b: str) -> Any:
    c.put_object(Bucket=b, Key="k", Body=b"0123456789")
    return [refused(lambda r=r: c.get_object(Bucket=b, Key="k", Range=r)) for r in ("bytes=10-", "bytes=-0")]


@case([("accepted", 200), ("PreconditionFailed", 412)])
def create_only_put(c: Any, b: str) -> Any:
    return [refused(lambda: c.put_object(Bucket=b, Key="new", Body=b"1", IfNoneMatch="*")) for _ in range(2)]


@case([("PreconditionFailed", 412), ("accepted", 200), ("NoSuchKey", 404)])
def put_if_match(c: Any, b: str) -> Any:
    etag = c.put_object(Bucket=b, Key="k", Body=b"1")["ETag"]
    return [
        refused(lambda: c.put_object(Bucket=b, Key="k", Body=b"2", IfMatch='"stale"')),
        refused(lambda: c.put_object(Bucket=b, Key="k", Body=b"2", IfMatch=etag)),
        refused(lambda: c.put_object(Bucket=b, Key="other", Body=b"2", IfMatch=etag)),
    ]


@case([("304", 304), ("accepted", 200), ("PreconditionFailed", 412), ("accepted", 200)])
def get_by_etag(c: Any, b: str) -> Any:
    etag = c.put_object(Bucket=b, Key="k", Body=b"1")["ETag"]
    return [
        refused(lambda: c.get_object(Bucket=b, Key="k", IfNoneMatch=etag)),
        refused(lambda: c.get_object(Bucket=b, Key="k", IfNoneMatch='"other"')),
        refused(lambda: c.get_object(Bucket=b, Key="k", IfMatch='"other"')),
        refused(lambda: c.get_object(Bucket=b, Key="k", IfMatch=etag)),
    ]


@case([("304", 304), ("accepted", 200), ("PreconditionFailed", 412), ("accepted", 200)])
def get_by_date(c: Any, b: str) -> Any:
    fill(c, b, "k")
    later, earlier = datetime.now(UTC) + timedelta(hours=1), datetime.now(UTC) - timedelta(hours=1)
    return [
        refused(lambda: c.get_object(Bucket=b, Key="k", IfModifiedSince=later)),
        refused(lambda: c.get_object(Bucket=b, Key="k", IfModifiedSince=earlier)),
        refused(lambda: c.get_object(Bucket=b, Key="k", IfUnmodifiedSince=earlier)),
        refused(lambda: c.get_object(Bucket=b, Key="k", IfUnmodifiedSince=later)),
    ]


# --- checksums ---------------------------------------------------------------------------------------------------------------


@case(("NSRBwg==", True))
def default_crc32_is_kept_and_given_back(c: Any, b: str) -> Any:
    answer = c.put_object(Bucket=b, Key="k", Body=b"abc")
    got = c.get_object(Bucket=b, Key="k", ChecksumMode="ENABLED")
    return answer["ChecksumCRC32"], got["Body"].read() == b"abc" and got["ChecksumCRC32"] == answer["ChecksumCRC32"]


@case(
    [
        ("ChecksumSHA1", "qZk+NkcGgWq6PiVxeFDCbJzQ2J0="),
        ("ChecksumSHA256", "ungWv48Bz+pBQUDeXa4iI7ADYaOWF3qctBD/YfIAFa0="),
    ]
)
def sha_checksums(c: Any, b: str) -> Any:
    out = []
    for algorithm in ("SHA1", "SHA256"):
        c.put_object(Bucket=b, Key=algorithm, Body=b"abc", ChecksumAlgorithm=algorithm)
        head = c.head_object(Bucket=b, Key=algorithm, ChecksumMode="ENABLED")
        out.append((f"Checksum{algorithm}", head.get(f"Checksum{algorithm}")))
    return out


@case(
    [("BadDigest", 400), ("BadDigest", 400), ("BadDigest", 400)],
    moto=[("accepted", 200), ("accepted", 200), ("accepted", 200)],
)
def wrong_checksums_are_refused(c: Any, b: str) -> Any:
    return [
        refused(lambda: c.put_object(Bucket=b, Key="k", Body=b"abc", ContentMD5="AAAAAAAAAAAAAAAAAAAAAA==")),
        refused(lambda: c.put_object(Bucket=b, Key="k", Body=b"abc", ChecksumCRC32="AAAAAA==")),
        refused(lambda: c.put_object(Bucket=b, Key="k", Body=b"abc", ChecksumCRC64NVME="AAAAAAAAAAA=")),
    ]


@case([("InvalidDigest", 400), ("InvalidRequest", 400)], moto=[("accepted", 200), ("accepted", 200)])
def checksums_that_are_none_are_refused(c: Any, b: str) -> Any:
    return [
        refused(lambda: c.put_object(Bucket=b, Key="k", Body=b"abc", ContentMD5="abc")),
        refused(lambda: c.put_object(Bucket=b, Key="k", Body=b"abc", ChecksumCRC32="abc")),
    ]


@case([("PreconditionFailed", 412), ("NoSuchKey", 404), ("accepted", 200)])
def conditional_deletes(c: Any, b: str) -> Any:
    etag = c.put_object(Bucket=b, Key="k", Body=b"1")["ETag"]
    return [
        refused(lambda: c.delete_object(Bucket=b, Key="k", IfMatch='"other"')),
        refused(lambda: c.delete_object(Bucket=b, Key="no", IfMatch=etag)),
        refused(lambda: c.delete_object(Bucket=b, Key="k", IfMatch=etag)),
    ]


# --- copies ------------------------------------------------------------------------------------------------------------------


@case((b"body", {"k": "v"}, "text/a", {"n": "w"}, "text/b"))
def copy_keeps_or_replaces_metadata(c: Any, b: str) -> Any:
    c.put_object(Bucket=b, Key="s p+é", Body=b"body", Metadata={"k": "v"}, ContentType="text/a")
    c.copy_object(Bucket=b, Key="kept", CopySource={"Bucket": b, "Key": "s p+é"})
    c.copy_object(
        Bucket=b,
        Key="replaced",
        CopySource={"Bucket": b, "Key": "s p+é"},
        MetadataDirective="REPLACE",
        Metadata={"n": "w"},
        ContentType="text/b",
    )
    kept, new = c.get_object(Bucket=b, Key="kept"), c.get_object(Bucket=b, Key="replaced")
    return kept["Body"].read(), kept["Metadata"], kept["ContentType"], new["Metadata"], new["ContentType"]


@case(
    [("InvalidRequest", 400), ("NoSuchKey", 404), ("NoSuchBucket", 404), ("PreconditionFailed", 412)],
    moto=[("InvalidRequest", 400), ("NoSuchKey", 404), ("NoSuchBucket", 404), ("accepted", 200)],
)
def copies_that_are_refused(c: Any, b: str) -> Any:
    fill(c, b, "k")
    return [
        refused(lambda: c.copy_object(Bucket=b, Key="k", CopySource={"Bucket": b, "Key": "k"})),
        refused(lambda: c.copy_object(Bucket=b, Key="x", CopySource={"Bucket": b, "Key": "no"})),
        refused(lambda: c.copy_object(Bucket=b, Key="x", CopySource={"Bucket": b + "-no", "Key": "k"})),
        refused(
            lambda: c.copy_object(Bucket=b, Key="x", CopySource={"Bucket": b, "Key": "k"}, CopySourceIfMatch='"other"')
        ),
    ]


# --- deletion of many --------------------------------------------------------------------------------------------------------


@case((["a", "never", "b <&>"], [], ["c"]))
def delete_objects_names_all_keys(c: Any, b: str) -> Any:
    fill(c, b, "a", "b <&>", "c")
    answer = c.delete_objects(Bucket=b, Delete={"Objects": [{"Key": "a"}, {"Key": "never"}, {"Key": "b <&>"}]})
    return [d["Key"] for d in answer["Deleted"]], answer.get("Errors", []), keys_of(c.list_objects_v2(Bucket=b))


@case((False, 0), moto=(True, 0))
def quiet_deletion_says_nothing(c: Any, b: str) -> Any:
    fill(c, b, "a", "b")
    answer = c.delete_objects(Bucket=b, Delete={"Objects": [{"Key": "a"}, {"Key": "b"}], "Quiet": True})
    return "Deleted" in answer, c.list_objects_v2(Bucket=b)["KeyCount"]


@case(("MalformedXML", 400))
def deletion_of_nothing_is_refused(c: Any, b: str) -> Any:
    return refused(lambda: c.delete_objects(Bucket=b, Delete={"Objects": []}))


# --- listings ----------------------------------------------------------------------------------------------------------------


@case((["a", "b/1", "b/2", "c"], 4, False, 1000))
def list_v2_is_sorted(c: Any, b: str) -> Any:
    fill(c, b, "c", "b/2", "a", "b/1")
    answer = c.list_objects_v2(Bucket=b)
    return keys_of(answer), answer["KeyCount"], answer["IsTruncated"], answer["MaxKeys"]


@case((['"0cc175b9c0f1b6a831c399e269772661"'], [1], ["STANDARD"], [["CRC32"]]))
def list_entries_say_etag_size_class_and_checksum(c: Any, b: str) -> Any:
    fill(c, b, "a")
    contents = c.list_objects_v2(Bucket=b)["Contents"]
    return tuple([o[n] for o in contents] for n in ("ETag", "Size", "StorageClass", "ChecksumAlgorithm"))


@case((["l/08", "l/09"], ["l/03", "l/04"], 2, True))
def list_v2_start_after_and_max_keys(c: Any, b: str) -> Any:
    fill(c, b, *(f"l/{i:02}" for i in range(10)))
    first = c.list_objects_v2(Bucket=b, Prefix="l/", StartAfter="l/07")
    second = c.list_objects_v2(Bucket=b, Prefix="l/", StartAfter="l/02", MaxKeys=2)
    return keys_of(first), keys_of(second), second["KeyCount"], second["IsTruncated"]


@case((5, True, True))
def list_v2_pages_cover_everything_once(c: Any, b: str) -> Any:
    names = [f"p/{i:03}" for i in range(23)]
    fill(c, b, *names)
    pages = list(c.get_paginator("list_objects_v2").paginate(Bucket=b, PaginationConfig={"PageSize": 5}))
    found = [k for p in pages for k in keys_of(p)]
    return len(pages), found == names, all("NextContinuationToken" in p for p in pages[:-1])


@case((["top"], ["a/", "b/"], 3))
def list_v2_delimiter(c: Any, b: str) -> Any:
    fill(c, b, "a/1", "a/2", "b/1/x", "top")
    answer = c.list_objects_v2(Bucket=b, Delimiter="/")
    return keys_of(answer), prefixes_of(answer), answer["KeyCount"]


@case(([], ["a/b/"], ["a/b--", "a/c--"]))
def delimiters_with_prefixes(c: Any, b: str) -> Any:
    fill(c, b, "a/b/1", "a/b/2", "a/b--x", "a/c--y/z", "z")
    answer = c.list_objects_v2(Bucket=b, Delimiter="/", Prefix="a/b/".rstrip("/") + "/"[:0], MaxKeys=1000)
    long = c.list_objects_v2(Bucket=b, Delimiter="--", Prefix="a/")
    return [k for k in keys_of(answer) if k.startswith("a/b/")], prefixes_of(answer), prefixes_of(long)


@case((["a/", "b/", "c/"], 3))
def pages_of_common_prefixes(c: Any, b: str) -> Any:
    fill(c, b, "a/1", "a/2", "b/1", "b/2", "c/1")
    pages = list(c.get_paginator("list_objects_v2").paginate(Bucket=b, Delimiter="/", PaginationConfig={"PageSize": 1}))
    return [p for page in pages for p in prefixes_of(page)], len(pages)


@case((0, False, []))
def max_keys_zero(c: Any, b: str) -> Any:
    fill(c, b, "a")
    answer = c.list_objects_v2(Bucket=b, MaxKeys=0)
    return answer["KeyCount"], answer["IsTruncated"], keys_of(answer)


@case((["a", "b"], True, ["c", "d"]))
def list_v1_marker(c: Any, b: str) -> Any:
    fill(c, b, "a", "b", "c", "d")
    first = c.list_objects(Bucket=b, MaxKeys=2)
    return keys_of(first), first["IsTruncated"], keys_of(c.list_objects(Bucket=b, Marker="b"))


@case((["a/"], "a/", ["b/"]), moto=(["a/", "b/"], None, ["a/", "b/"]))
def list_v1_next_marker_with_delimiter(c: Any, b: str) -> Any:
    fill(c, b, "a/1", "a/2", "b/1")
    first = c.list_objects(Bucket=b, Delimiter="/", MaxKeys=1)
    second = c.list_objects(Bucket=b, Delimiter="/", Marker=first.get("NextMarker", ""))
    return prefixes_of(first), first.get("NextMarker"), prefixes_of(second)


@case((True, False, True))
def owner_only_when_asked_for(c: Any, b: str) -> Any:
    fill(c, b, "a")
    v1 = c.list_objects(Bucket=b)["Contents"][0]
    v2 = c.list_objects_v2(Bucket=b)["Contents"][0]
    asked = c.list_objects_v2(Bucket=b, FetchOwner=True)["Contents"][0]
    return "Owner" in v1, "Owner" in v2, "Owner" in asked


@case(("NoSuchBucket", 404))
def listing_of_a_missing_bucket(c: Any, b: str) -> Any:
    return refused(lambda: c.list_objects_v2(Bucket=b + "-no"))


# --- multipart ---------------------------------------------------------------------------------------------------------------


def begin(c: Any, b: str, key: str, **kw: Any) -> str:
    return c.create_multipart_upload(Bucket=b, Key=key, **kw)["UploadId"]


def upload_parts(c: Any, b: str, key: str, upload: str, *bodies: bytes, **kw: Any) -> list[dict[str, Any]]:
    parts = []
    for number, body in enumerate(bodies, 1):
        answer = c.upload_part(Bucket=b, Key=key, UploadId=upload, PartNumber=number, Body=body, **kw)
        parts.append(
            {
                "PartNumber": number,
                "ETag": answer["ETag"],
                **{k: v for k, v in answer.items() if k.startswith("Checksum")},
            }
        )
    return parts


def finish(c: Any, b: str, key: str, upload: str, parts: list[dict[str, Any]], **kw: Any) -> Any:
    return c.complete_multipart_upload(Bucket=b, Key=key, UploadId=upload, MultipartUpload={"Parts": parts}, **kw)


@case(
    (
        '"' + hashlib.md5(hashlib.md5(b"a" * 5 * MIB).digest() + hashlib.md5(b"tail").digest()).hexdigest() + '-2"',
        5 * MIB + 4,
        {"k": "v"},
        "text/x",
        b"aatail",
    )
)
def multipart_joins_parts(c: Any, b: str) -> Any:
    upload = begin(c, b, "m", Metadata={"k": "v"}, ContentType="text/x")
    done = finish(c, b, "m", upload, upload_parts(c, b, "m", upload, b"a" * 5 * MIB, b"tail"))
    head = c.head_object(Bucket=b, Key="m")
    end = c.get_object(Bucket=b, Key="m", Range="bytes=-6")["Body"].read()
    return done["ETag"], head["ContentLength"], head["Metadata"], head["ContentType"], end


@case(
    [("NoSuchUpload", 404), ("NoSuchUpload", 404), ("NoSuchUpload", 404)],
    moto=[("500", 500), ("500", 500), ("NoSuchUpload", 404)],
)
def uploads_that_are_not_there(c: Any, b: str) -> Any:
    upload = begin(c, b, "m")
    c.abort_multipart_upload(Bucket=b, Key="m", UploadId=upload)
    parts = [{"PartNumber": 1, "ETag": '"x"'}]
    return [
        refused(lambda: c.upload_part(Bucket=b, Key="m", UploadId=upload, PartNumber=1, Body=b"x")),
        refused(lambda: finish(c, b, "m", upload, parts)),
        refused(lambda: c.list_parts(Bucket=b, Key="m", UploadId=upload)),
    ]


@case(
    [
        ("EntityTooSmall", 400),
        ("InvalidPartOrder", 400),
        ("InvalidPart", 400),
        ("InvalidPart", 400),
        ("MalformedXML", 400),
    ],
    moto=[
        ("EntityTooSmall", 400),
        ("EntityTooSmall", 400),
        ("InvalidPart", 400),
        ("InvalidPart", 400),
        ("MalformedXML", 400),
    ],
)
def completions_that_are_refused(c: Any, b: str) -> Any:
    upload = begin(c, b, "m")
    parts = upload_parts(c, b, "m", upload, b"small", b"tail")
    parts = [{k: p[k] for k in ("PartNumber", "ETag")} for p in parts]
    return [
        refused(lambda: finish(c, b, "m", upload, parts)),
        refused(lambda: finish(c, b, "m", upload, parts[::-1])),
        refused(lambda: finish(c, b, "m", upload, [{"PartNumber": 1, "ETag": '"' + "0" * 32 + '"'}])),
        refused(lambda: finish(c, b, "m", upload, [{"PartNumber": 7, "ETag": parts[0]["ETag"]}])),
        refused(lambda: finish(c, b, "m", upload, [])),
    ]


@case(([(1, 5 * MIB), (2, 4)], [("m", True)], []))
def parts_and_uploads_are_listed(c: Any, b: str) -> Any:
    upload = begin(c, b, "m")
    upload_parts(c, b, "m", upload, b"a" * 5 * MIB, b"tail")
    parts = [(p["PartNumber"], p["Size"]) for p in c.list_parts(Bucket=b, Key="m", UploadId=upload)["Parts"]]
    uploads = [(u["Key"], u["UploadId"] == upload) for u in c.list_multipart_uploads(Bucket=b).get("Uploads", [])]
    c.abort_multipart_upload(Bucket=b, Key="m", UploadId=upload)
    return parts, uploads, c.list_multipart_uploads(Bucket=b).get("Uploads", [])


@case(b"2345")
def part_copied_from_a_range(c: Any, b: str) -> Any:
    c.put_object(Bucket=b, Key="s", Body=b"0123456789")
    upload = begin(c, b, "m")
    part = c.upload_part_copy(
        Bucket=b,
        Key="m",
        UploadId=upload,
        PartNumber=1,
        CopySource={"Bucket": b, "Key": "s"},
        CopySourceRange="bytes=2-5",
    )
    finish(c, b, "m", upload, [{"PartNumber": 1, "ETag": part["CopyPartResult"]["ETag"]}])
    return c.get_object(Bucket=b, Key="m")["Body"].read()


@case(b"new")
def a_part_sent_again_replaces_the_first(c: Any, b: str) -> Any:
    upload = begin(c, b, "m")
    upload_parts(c, b, "m", upload, b"old")
    finish(c, b, "m", upload, upload_parts(c, b, "m", upload, b"new"))
    return c.get_object(Bucket=b, Key="m")["Body"].read()


@case(("PreconditionFailed", 412))
def completion_create_only(c: Any, b: str) -> Any:
    fill(c, b, "m")
    upload = begin(c, b, "m")
    parts = upload_parts(c, b, "m", upload, b"x")
    return refused(lambda: finish(c, b, "m", upload, parts, IfNoneMatch="*"))


@case(True, moto=False)
def composite_sha256_of_a_multipart_object(c: Any, b: str) -> Any:
    import base64

    upload = begin(c, b, "m", ChecksumAlgorithm="SHA256")
    bodies = (b"a" * 5 * MIB, b"tail")
    done = finish(c, b, "m", upload, upload_parts(c, b, "m", upload, *bodies, ChecksumAlgorithm="SHA256"))
    whole = hashlib.sha256(b"".join(hashlib.sha256(x).digest() for x in bodies)).digest()
    return done.get("ChecksumSHA256") == base64.b64encode(whole).decode() + "-2"


# --- buckets -----------------------------------------------------------------------------------------------------------------


@case((True, 200, "404", True))
def buckets_come_and_go(c: Any, b: str) -> Any:
    c.create_bucket(Bucket=b + "-2")
    listed = b + "-2" in [x["Name"] for x in c.list_buckets()["Buckets"]]
    head = c.head_bucket(Bucket=b + "-2")["ResponseMetadata"]["HTTPStatusCode"]
    c.delete_bucket(Bucket=b + "-2")
    gone = refused(lambda: c.head_bucket(Bucket=b + "-2"))[0]
    return listed, head, gone, b + "-2" not in [x["Name"] for x in c.list_buckets()["Buckets"]]


@case(
    [("BucketNotEmpty", 409), ("NoSuchBucket", 404), ("InvalidBucketName", 400)],
    moto=[("BucketNotEmpty", 409), ("NoSuchBucket", 404), ("accepted", 200)],
)
def bucket_requests_that_are_refused(c: Any, b: str) -> Any:
    fill(c, b, "k")
    return [
        refused(lambda: c.delete_bucket(Bucket=b)),
        refused(lambda: c.delete_bucket(Bucket=b + "-no")),
        refused(lambda: c.create_bucket(Bucket="Not_A_Bucket")),
    ]


@case("accepted")
def creating_ones_own_bucket_again_in_us_east_1(c: Any, b: str) -> Any:
    return refused(lambda: c.create_bucket(Bucket=b))[0]


@case((None, True))
def bucket_location_and_versioning(c: Any, b: str) -> Any:
    return c.get_bucket_location(Bucket=b)["LocationConstraint"], "Status" not in c.get_bucket_versioning(Bucket=b)


# --- presigned URLs ----------------------------------------------------------------------------------------------------------


def fetch(
    url: str, method: str = "GET", body: bytes | None = None, headers: dict[str, str] | None = None
) -> tuple[int, bytes]:
    request = urllib.request.Request(url, data=body, method=method, headers=headers or {})
    if body is not None and "Content-type" not in request.headers:
        request.add_unredirected_header("Content-type", "")
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as e:
        with e:
            return e.code, e.read()


@case((200, 200, b"by url"))
def presigned_put_and_get(c: Any, b: str) -> Any:
    put = fetch(c.generate_presigned_url("put_object", Params={"Bucket": b, "Key": "p k"}), "PUT", b"by url")[0]
    status, body = fetch(c.generate_presigned_url("get_object", Params={"Bucket": b, "Key": "p k"}))
    return put, status, body
