"""AWS credentials and region for obstore, looked up when a store is first used and never earlier."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

from ..errors import MissingExtraError, StorePermissionError

# botocore renews temporary credentials 10 to 15 minutes before they expire, so asking it every 5 minutes never yields dead ones.
TTL = timedelta(minutes=5)


def find_provider() -> Any:
    """None where the environment has static keys, which obstore reads by itself; else what asks boto3 (profile, SSO, container,
    instance).

    The environment comes first, as with boto3, and without loading boto3: a session of the local runtime saves 70 ms of CPU.
    Raises: StorePermissionError when there are no credentials.
    """
    if os.environ.get("AWS_ACCESS_KEY_ID") and os.environ.get("AWS_SECRET_ACCESS_KEY"):
        return None
    try:
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError as e:
        raise MissingExtraError("S3 without AWS_ACCESS_KEY_ID in the environment needs boto3: pip install boto3") from e
    try:
        return Boto3CredentialProvider(ttl=TTL)
    except ValueError as e:
        raise StorePermissionError(
            "no credentials for the store: export AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, "
            "or use an instance role"
        ) from e


def find_region() -> str:
    """Region from the environment, else from the AWS configuration, else us-east-1 (what local S3 servers expect)."""
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if region:
        return region
    if os.environ.get("AWS_ACCESS_KEY_ID") and not os.environ.get("AWS_PROFILE"):
        return "us-east-1"
    try:
        import boto3
    except ImportError:
        return "us-east-1"
    return boto3.Session().region_name or "us-east-1"
