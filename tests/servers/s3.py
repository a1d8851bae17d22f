"""S3 on loopback: moto's server in a separate process."""

from __future__ import annotations

import json
import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from servers.processes import Server, answers, free_ports

_PROCESS = Path(__file__).with_name("s3_process.py")
_REGION = "us-east-1"


@dataclass(frozen=True)
class Request:
    """Request that the server has received.

    Attributes
    ----------
    method, path, query : str
        As in HTTP; the path starts with the bucket's name.
    range : str
        The value of the ``Range`` header; empty if there is none.
    """

    method: str
    path: str
    query: str
    range: str


class S3:
    """Server with one bucket for all tests; tests that break things make other buckets.

    Parameters
    ----------
    folder : Path
        Folder for the server's output, and for the log of requests.

    Attributes
    ----------
    endpoint : str
        The server's URL.
    url : str
        Prefix in the shared bucket: ``s3://…``.
    storage_options : dict
        Options of s3fs for this server.
    """

    def __init__(self, folder: Path) -> None:
        (self.port,) = free_ports(1)
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self._log = folder / "requests.jsonl"
        self._output = folder / "s3.txt"
        self.storage_options = self.options()

    def start_process(self) -> None:
        """Start the server, and make the shared bucket."""
        self._log.touch()
        command = [sys.executable, "-I", str(_PROCESS), str(self.port), str(self._log)]
        self._server = Server("S3", command, self._output, guarded=False)
        self._server.wait_until(lambda: answers(self.port), "ready")
        self.url = f"{self.new_bucket()}/tests"

    def end_process(self) -> None:
        """End the server, which loses its objects."""
        self._server.kill()

    def stop(self) -> None:
        """Stop listening and close all connections; the objects stay."""
        self._server.tell("close")
        self._server.wait_until(lambda: not answers(self.port), "closed")

    def start(self) -> None:
        """Start listening again."""
        self._server.tell("open")
        self._server.wait_until(lambda: answers(self.port), "open")

    def options(
        self, key: str = "test", secret: str = "test", endpoint: str | None = None
    ) -> dict[str, Any]:
        """Return storage options for s3fs; the server accepts any key and secret."""
        return {
            "key": key,
            "secret": secret,
            "endpoint_url": endpoint or self.endpoint,
            "client_kwargs": {"region_name": _REGION},
        }

    def new_bucket(self) -> str:
        """Make a bucket, and return its URL."""
        bucket = f"bucket-{uuid.uuid4().hex[:12]}"
        self.client().create_bucket(Bucket=bucket)
        return f"s3://{bucket}"

    def client(self) -> Any:
        """Return a boto3 client that uses the server directly, not through a proxy."""
        import boto3

        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            region_name=_REGION,
            aws_access_key_id="test",
            aws_secret_access_key="test",
        )

    def configure(self, spark: Any, url: str | None = None) -> None:
        """Let a running Spark session reach a bucket, by default the shared one, by ``s3a://``."""
        let_spark_reach(spark, url or self.url, self.storage_options)

    def requests(self) -> Sequence[Request]:
        """Return all requests so far, in order."""
        lines = self._log.read_text().splitlines()
        return [Request(**json.loads(line)) for line in lines]

    def objects(self, url: str) -> dict[str, bytes]:
        """Return the objects below a URL, by the rest of their keys."""
        bucket, _, prefix = url.partition("://")[2].partition("/")
        client = self.client()
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
        keys = [entry["Key"] for page in pages for entry in page.get("Contents", ())]
        return {
            key.removeprefix(prefix).lstrip("/"): client.get_object(Bucket=bucket, Key=key)[
                "Body"
            ].read()
            for key in keys
        }


def let_spark_reach(spark: Any, url: str, storage_options: dict[str, Any]) -> None:
    """Let a running Spark session, which has the archives, reach a bucket by ``s3a://``.

    Parameters
    ----------
    spark : SparkSession
        The session.
    url : str
        A URL in the bucket.
    storage_options : dict
        Options of s3fs for the server.
    """
    bucket = url.partition("://")[2].partition("/")[0]
    settings = {
        "endpoint": storage_options["endpoint_url"],
        "endpoint.region": _REGION,
        "path.style.access": "true",
        "connection.ssl.enabled": "false",
        "access.key": storage_options["key"],
        "secret.key": storage_options["secret"],
        "aws.credentials.provider": "org.apache.hadoop.fs.s3a.SimpleAWSCredentialsProvider",
    }
    configuration = spark.sparkContext._jsc.hadoopConfiguration()
    for name, value in settings.items():
        configuration.set(f"fs.s3a.bucket.{bucket}.{name}", value)
