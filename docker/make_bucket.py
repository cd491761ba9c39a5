"""Make the bucket ``BUCKET`` if it is not there: endpoint and keys come from the AWS_ variables."""

from __future__ import annotations

import os
import sys

import boto3
from botocore.exceptions import ClientError

HAVE_IT = frozenset({"BucketAlreadyOwnedByYou", "BucketAlreadyExists"})


def main() -> int:
    """Exit status 0 when the bucket exists afterwards."""
    name, client = os.environ["BUCKET"], boto3.client("s3")
    try:
        try:
            client.create_bucket(Bucket=name)
        except ClientError as error:
            if error.response["Error"]["Code"] not in HAVE_IT:
                raise
            client.head_bucket(Bucket=name)  # it may be another account's
    except ClientError as error:
        print(f"cannot make bucket {name}: {error}", file=sys.stderr)
        return 1
    print(f"bucket {name} is there")
    return 0


if __name__ == "__main__":
    sys.exit(main())
