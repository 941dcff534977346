"""The bucket, role and objects of a deployment. Each step checks the present state first, and only tagged roles are changed."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from . import iam
from .calls import Calls, RefusedError
from .settings import TAG

ROLE_CALLS, ROLE_PAUSE_S = 18, 5.0
POLICY = "agentcore-rl"  # name of a role's policy, and the beginning of the names of its further ones
NO_ENTITY = ("NoSuchEntity",)
NOT_IN_S3 = ("404", "NoSuchKey", "NotFound", "NoSuchBucket")


class Resources:
    """The resources that deployments of one tag share.

    Raises (all its methods): ConfigError, RefusedError.
    """

    def __init__(self, tag: str, calls: Calls) -> None:
        self.tag = {"Key": TAG, "Value": tag}
        self._call = calls
        self._s3, self._iam = partial(calls, "s3"), partial(calls, "iam")

    def bucket(self, name: str) -> None:
        """Create the bucket if it is absent."""
        if self._s3("HeadBucket", Bucket=name, absent=NOT_IN_S3) is not None:
            return
        self._call.step(f"bucket {name}", "created")
        region = self._call.region
        where = None if region == "us-east-1" else {"LocationConstraint": region}
        there = ("BucketAlreadyOwnedByYou",)  # and closed to the public, by S3's own default
        self._s3("CreateBucket", Bucket=name, CreateBucketConfiguration=where, absent=there)

    def has_object(self, bucket: str, key: str, size: int | None = None) -> bool:
        """Return True if the bucket has an object with this key, and of this size in bytes if one is given."""
        found = self._s3("HeadObject", Bucket=bucket, Key=key, absent=NOT_IN_S3)
        return found is not None and size in (None, found["ContentLength"])

    def upload(self, files: Iterable[Path], bucket: str, prefix: str) -> str:
        """Upload the files that the bucket does not have yet. Returns the address of their folder."""
        self.bucket(bucket)
        for file in files:
            size = file.stat().st_size
            if not self.has_object(bucket, prefix + file.name, size):
                self._call.step(f"{file.name} ({size:,} bytes)", f"uploaded to s3://{bucket}/{prefix}")
                self._call.upload(file, bucket, prefix + file.name)
        return f"s3://{bucket}/{prefix}"

    def remove_objects(self, bucket: str, prefix: str) -> None:
        """Remove the objects below the prefix whose name begins with a digest, and the parts of uploads that were interrupted."""
        where: dict[str, Any] = {"Bucket": bucket, "Prefix": prefix, "absent": ("NoSuchBucket",)}
        for part in (self._s3("ListMultipartUploads", **where) or {}).get("Uploads", []):
            self._s3("AbortMultipartUpload", Bucket=bucket, Key=part["Key"], UploadId=part["UploadId"])
        for key in [item["Key"] for item in self._call.every("s3", "ListObjectsV2", "Contents", **where)]:
            if re.match(r"[0-9a-f]{12}[./]", key.removeprefix(prefix)):
                self._call.step(f"s3://{bucket}/{key}", "removed")
                self._s3("DeleteObject", Bucket=bucket, Key=key)

    def role(self, name: str, description: str, trust: iam.Policy, rights: iam.Policy) -> str:
        """Create the role, or bring it up to date. Returns its ARN."""
        role: dict[str, Any] = {"RoleName": name}
        arn = f"arn:{self._call.partition}:iam::{self._call.account}:role/{name}"
        found = self._iam("GetRole", **role, absent=NO_ENTITY)
        if found is None:
            self._call.step(f"role {name}", "created")
            about = {"Description": description, "Tags": [self.tag]}
            document = {"AssumeRolePolicyDocument": iam.text(trust)}
            self._iam("CreateRole", **role, **document, **about, absent=("EntityAlreadyExists",))
        elif not self._is_ours(found["Role"]):
            raise ConfigError(
                f"the role {name} exists and was not made by this command in {self._call.region}: choose another --name"
            )
        elif found["Role"]["AssumeRolePolicyDocument"] != trust:
            self._iam("UpdateAssumeRolePolicy", **role, PolicyDocument=iam.text(trust))
        self.put_role_policy(name, POLICY, rights)
        return arn

    def put_role_policy(self, role: str, name: str, rights: iam.Policy) -> bool:
        """Give a role these rights. Returns False if it has them."""
        now = self._iam("GetRolePolicy", RoleName=role, PolicyName=name, absent=NO_ENTITY)
        if now is not None and now["PolicyDocument"] == rights:
            return False
        self._iam("PutRolePolicy", RoleName=role, PolicyName=name, PolicyDocument=iam.text(rights))
        return True

    def until_role_is_known(self, create: Callable[[], Any]) -> Any:
        """Call ``create`` until its service knows the role, which takes some seconds for a new one. Returns its reply."""
        for _ in range(ROLE_CALLS):
            try:
                return create()
            except RefusedError as e:
                if "role" not in str(e).lower() or e.code not in ("ValidationException", "AccessDeniedException"):
                    raise
                if self._call.caller in str(e):  # the caller lacks a right
                    raise
                self._call.say("the role is not known everywhere yet: waiting")
                time.sleep(ROLE_PAUSE_S)
        return create()

    def remove_role(self, name: str) -> bool:
        """Remove a role with the policies of this package's commands. Returns False for another one, which stays."""
        found = self._iam("GetRole", RoleName=name, absent=NO_ENTITY)
        if found is None:
            return True
        if not self._is_ours(found["Role"]):
            return False
        self._call.step(f"role {name}", "removed")
        for policy in (self._iam("ListRolePolicies", RoleName=name, absent=NO_ENTITY) or {}).get("PolicyNames", []):
            if policy.startswith(POLICY):  # `promote` gives rights to the agent's role, too
                self._iam("DeleteRolePolicy", RoleName=name, PolicyName=policy, absent=NO_ENTITY)
        self._iam("DeleteRole", RoleName=name, absent=NO_ENTITY)
        return True

    def _is_ours(self, role: Mapping[str, Any]) -> bool:
        """Return True for a role with the tag whose trust names no other region: roles belong to no region."""
        regions = re.findall(r'"arn:[^:"]+:[^:"]+:([^:"]+):', json.dumps(role["AssumeRolePolicyDocument"]))
        return self.tag in role.get("Tags", []) and {*regions} <= {self._call.region}
