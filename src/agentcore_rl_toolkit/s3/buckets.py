"""Operations on buckets: create, head, list, delete; the listings of their keys and uploads; deletion of many keys."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable

from .conditions import check_write
from .disk import Bucket, Disk, StoredObject
from .listing import page
from .multipart import Uploads
from .objects import iso
from .wire import xml
from .wire.errors import S3Error
from .wire.request import Answer, Request, xml_answer

_NAME = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_LIKE_ADDRESS = re.compile(r"\d+\.\d+\.\d+\.\d+")
_MOST = 1000
OWNER = "<Owner><ID>agentcore-rl</ID><DisplayName>agentcore-rl</DisplayName></Owner>"


def check_name(name: str) -> None:
    """Raises: S3Error InvalidBucketName."""
    if not _NAME.fullmatch(name) or ".." in name or _LIKE_ADDRESS.fullmatch(name):
        raise S3Error("InvalidBucketName", BucketName=name)


def list_buckets(disk: Disk, request: Request) -> Answer:
    """ListBuckets."""
    prefix, after = request.query.get("prefix", ""), request.query.get("continuation-token", "")
    limit = _limit(request, "max-buckets", 10_000)
    names = sorted(n for n in disk.buckets if n.startswith(prefix) and n > after)
    shown = names[:limit]
    entries = [
        f"<Bucket><Name>{n}</Name><CreationDate>{iso(disk.buckets[n].created_s)}</CreationDate></Bucket>" for n in shown
    ]
    parts = [OWNER, f"<Buckets>{''.join(entries)}</Buckets>"]
    if len(shown) < len(names):
        parts.append(xml.element("ContinuationToken", shown[-1]))
    return xml_answer(xml.document("ListAllMyBucketsResult", parts))


def create(disk: Disk, request: Request, body: bytes, region: str) -> Answer:
    """CreateBucket. As in us-east-1, creating one's own bucket again succeeds there and is a conflict elsewhere."""
    check_name(request.bucket)
    location = None
    if body:
        location = xml.parse(body, "CreateBucketConfiguration").findtext("LocationConstraint")
    if request.bucket in disk.buckets:
        if location not in (None, "us-east-1"):
            raise S3Error("BucketAlreadyOwnedByYou", BucketName=request.bucket)
    else:
        disk.create_bucket(request.bucket)
    return Answer(headers={"location": f"/{request.bucket}"})


def delete(disk: Disk, uploads: Uploads, bucket: Bucket) -> Answer:
    """DeleteBucket."""
    if bucket.objects:
        raise S3Error("BucketNotEmpty", BucketName=bucket.name)
    uploads.forget_bucket(bucket.name)
    disk.delete_bucket(bucket)
    return Answer(status=204)


def delete_objects(disk: Disk, bucket: Bucket, body: bytes) -> Answer:
    """DeleteObjects: up to 1,000 keys, each with an answer of its own unless ``Quiet``."""
    tree = xml.parse(body, "Delete")
    nodes = tree.findall("Object")
    if not 1 <= len(nodes) <= _MOST:
        raise S3Error("MalformedXML")
    quiet = tree.findtext("Quiet", "").strip() == "true"
    parts: list[str] = []
    for node in nodes:
        key, etag = node.findtext("Key"), node.findtext("ETag")
        if not key:
            raise S3Error("MalformedXML")
        try:
            if etag is not None:
                check_write({"if-match": etag}, bucket.objects.get(key))
            disk.remove(bucket, key)
            if not quiet:
                parts.append(f"<Deleted>{xml.element('Key', key)}</Deleted>")
        except S3Error as e:
            detail = [xml.element("Key", key), xml.element("Code", e.code), xml.element("Message", e.message)]
            parts.append(f"<Error>{''.join(detail)}</Error>")
    return xml_answer(xml.document("DeleteResult", parts))


def _limit(request: Request, name: str, most: int) -> int:
    text = request.query.get(name, str(most))
    if not text.isdecimal() or int(text) > 2**31 - 1:
        raise S3Error(
            "InvalidArgument",
            f"Provided {name} not an integer or within integer range",
            ArgumentName=name,
            ArgumentValue=text,
        )
    return min(int(text), most)


def list_objects(bucket: Bucket, request: Request) -> Answer:
    """ListObjects, version 1 and 2."""
    query = request.query
    two = query.get("list-type") == "2"
    prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
    limit = _limit(request, "max-keys", _MOST)
    text = _encoder(query.get("encoding-type"))
    after = query.get("start-after" if two else "marker", "")
    token = query.get("continuation-token") if two else None
    found = page(
        bucket.keys,
        prefix=prefix,
        delimiter=delimiter,
        after=_untoken(token) if token is not None else after,
        limit=limit,
    )
    with_owner = not two or query.get("fetch-owner") == "true"
    owner = OWNER if with_owner else ""
    parts = [f"<Name>{bucket.name}</Name><Prefix>{text(prefix)}</Prefix>"]
    if delimiter:
        parts.append(f"<Delimiter>{text(delimiter)}</Delimiter>")
    if "encoding-type" in query:
        parts.append("<EncodingType>url</EncodingType>")
    parts.append(
        f"<MaxKeys>{limit}</MaxKeys><IsTruncated>{'true' if found.last is not None else 'false'}</IsTruncated>"
    )
    if two:
        parts.append(f"<KeyCount>{len(found.entries)}</KeyCount>")
        if token is not None:
            parts.append(xml.element("ContinuationToken", token))
        if "start-after" in query:
            parts.append(f"<StartAfter>{text(after)}</StartAfter>")
        if found.last is not None:
            parts.append(xml.element("NextContinuationToken", _token(found.last)))
    else:
        parts.append(f"<Marker>{text(after)}</Marker>")
        if found.last is not None and delimiter:
            parts.append(f"<NextMarker>{text(found.last)}</NextMarker>")
    objects = bucket.objects
    for name, is_prefix in found.entries:
        if is_prefix:
            parts.append(f"<CommonPrefixes><Prefix>{text(name)}</Prefix></CommonPrefixes>")
        else:
            parts.append(_contents(objects[name], text(name), owner))
    return xml_answer(xml.document("ListBucketResult", parts))


def _contents(stored: StoredObject, key: str, owner: str) -> str:
    if not stored.listed:
        algorithms = "".join(f"<ChecksumAlgorithm>{a}</ChecksumAlgorithm>" for a in stored.checksums)
        if algorithms:
            algorithms += f"<ChecksumType>{stored.checksum_type or 'FULL_OBJECT'}</ChecksumType>"
        kind = stored.headers.get("x-amz-storage-class", "STANDARD")
        stored.listed = (
            f"</Key><LastModified>{iso(stored.modified_s)}</LastModified><ETag>&quot;{stored.etag}&quot;</ETag>"
            f"{algorithms}<Size>{stored.size}</Size><StorageClass>{kind}</StorageClass>"
        )
    return f"<Contents><Key>{key}{stored.listed}{owner}</Contents>"


def _encoder(kind: str | None) -> Callable[[str], str]:
    if kind is None:
        return xml.escape
    if kind != "url":
        raise S3Error("InvalidArgument", "Invalid Encoding Method specified in Request", ArgumentName="encoding-type")
    return xml.url_encode


def _token(last: str) -> str:
    return base64.urlsafe_b64encode(last.encode()).decode()


def _untoken(token: str) -> str:
    try:
        return base64.urlsafe_b64decode(token.encode()).decode()
    except (binascii.Error, ValueError):
        raise S3Error(
            "InvalidArgument", "The continuation token provided is incorrect", ArgumentName="continuation-token"
        ) from None


def list_uploads(uploads: Uploads, bucket: Bucket, request: Request) -> Answer:
    """ListMultipartUploads (no delimiter)."""
    query = request.query
    prefix, after = query.get("prefix", ""), (query.get("key-marker", ""), query.get("upload-id-marker", ""))
    limit = _limit(request, "max-uploads", _MOST)
    text = _encoder(query.get("encoding-type"))
    found = [u for u in uploads.in_bucket(bucket.name) if u.key.startswith(prefix)]
    if after[0]:
        known = [u.id for u in found]
        place = known.index(after[1]) + 1 if after[1] in known else None
        found = found[place:] if place is not None else [u for u in found if u.key > after[0]]
    shown = found[:limit]
    parts = [xml.element("Bucket", bucket.name), f"<KeyMarker>{text(after[0])}</KeyMarker>"]
    parts += [
        xml.element("UploadIdMarker", after[1]),
        f"<Prefix>{text(prefix)}</Prefix>",
        xml.element("MaxUploads", limit),
    ]
    parts.append(xml.element("IsTruncated", "true" if len(shown) < len(found) else "false"))
    if "encoding-type" in query:
        parts.append("<EncodingType>url</EncodingType>")
    if len(shown) < len(found) and shown:
        parts += [
            f"<NextKeyMarker>{text(shown[-1].key)}</NextKeyMarker>",
            xml.element("NextUploadIdMarker", shown[-1].id),
        ]
    for upload in shown:
        inner = (
            f"<Key>{text(upload.key)}</Key>{xml.element('UploadId', upload.id)}<StorageClass>STANDARD</StorageClass>"
        )
        parts.append(f"<Upload>{inner}{xml.element('Initiated', iso(upload.started_s))}</Upload>")
    return xml_answer(xml.document("ListMultipartUploadsResult", parts))
