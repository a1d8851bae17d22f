"""Test servers work, and do not outlive the process that started them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from botocore.exceptions import ClientError, EndpointConnectionError
from processes import ended, wait_until
from servers.fault_proxy import FaultProxy

_OWNER = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from servers.processes import Server
from servers.s3 import S3
s3 = S3(Path(sys.argv[2]))
s3.start_process()
server = Server("sleeper", ["sleep", "300"], Path(sys.argv[2], "output.txt"))
print("ready", flush=True)
time.sleep(300)
"""


def test_servers_end_when_their_process_is_killed(tmp_path: Path) -> None:
    tests = str(Path(__file__).parents[2])
    command = [sys.executable, "-c", _OWNER, tests, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as owner:
        try:
            assert owner.stdout is not None
            assert owner.stdout.readline() == b"ready\n"
            # S3, its guard, and the guard of sleeping processes.
            wait_until(lambda: len(_started_by(owner.pid)) == 3)
            started = _started_by(owner.pid)
        finally:
            owner.kill()
    for pid in started:
        wait_until(lambda pid=pid: ended(pid))


def _started_by(pid: int) -> list[int]:
    return [process.pid for process in psutil.Process(pid).children(recursive=True)]


def test_the_proxy_injects_faults(s3: Any) -> None:
    import boto3
    from botocore.config import Config

    bucket = s3.new_bucket().removeprefix("s3://")
    with FaultProxy(s3.port) as proxy:
        client = boto3.client(
            "s3",
            endpoint_url=proxy.endpoint,
            region_name="us-east-1",
            aws_access_key_id="test",
            aws_secret_access_key="test",
            config=Config(retries={"total_max_attempts": 1}),
        )
        content = bytes(range(256)) * 1000
        client.put_object(Bucket=bucket, Key="whole", Body=content)
        assert client.get_object(Bucket=bucket, Key="whole")["Body"].read() == content

        slow = proxy.fault("SlowDown", matches=lambda method, path: method == "GET", times=1)
        with pytest.raises(ClientError, match="SlowDown"):
            client.get_object(Bucket=bucket, Key="whole")
        assert client.get_object(Bucket=bucket, Key="whole")["Body"].read() == content
        assert slow.happened == 1

        proxy.fault("cut", matches=lambda method, path: path.endswith("/half"), after=1)
        client.put_object(Bucket=bucket, Key="half", Body=b"before")
        with pytest.raises(Exception, match=r"closed|reset|Broken|aborted"):
            client.put_object(Bucket=bucket, Key="half", Body=content)
        assert s3.objects(f"s3://{bucket}/half") == {"": b"before"}

        proxy.fault("cut answer")
        with pytest.raises(Exception, match=r"ended|closed|reset|Broken|Incomplete|bytes"):
            client.get_object(Bucket=bucket, Key="whole")["Body"].read()

        proxy.stop()
        with pytest.raises(EndpointConnectionError):
            client.list_objects_v2(Bucket=bucket)
        proxy.start()
        assert client.list_objects_v2(Bucket=bucket)["KeyCount"] == 2
