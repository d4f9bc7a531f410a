"""Real servers on loopback, each with a folder and a port of its own; they end with the block that began them."""

import json
import os
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from lakeupsert.testing.processes import wait_until

HOST = "127.0.0.1"


def require(path: Path, how: str) -> Path:
    """The server's program; where it is missing, CI fails and everybody else skips the test, told ``how`` to get it."""
    if not path.exists():
        reason = f"{path.name} is not there: {how}"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    return path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


@contextmanager
def serve(command: Sequence[str | Path], port: int, log: Path, env: Mapping[str, str] = {}) -> Iterator[None]:
    """Run a server that listens on ``port``; the block begins when it takes connections."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            list(map(str, command)), stdout=out, stderr=subprocess.STDOUT, env={**os.environ, **env}
        )
    try:

        def listens() -> bool:
            assert process.poll() is None, f"{command[0]} ended by itself: {log.read_text(errors='replace')[-2000:]}"
            with socket.socket() as probe:
                return probe.connect_ex((HOST, port)) == 0

        wait_until(listens, f"{command[0]} takes connections at port {port}")
        yield
    finally:
        process.terminate()
        process.wait()


@contextmanager
def elasticmq(log: Path) -> Iterator[str]:
    """ElasticMQ, which keeps to SQS's limits and answers; yields its endpoint."""
    jars = require(Path("build/servers/elasticmq"), "run `make servers`")
    port = free_port()
    options = {
        "rest-sqs.bind-hostname": HOST,
        "rest-sqs.bind-port": port,
        "rest-sqs.sqs-limits": "strict",
        "rest-stats.enabled": "false",
        "node-address.host": HOST,
        "node-address.port": port,
    }
    settings = [f"-D{name}={value}" for name, value in options.items()]
    command = ["java", "-Xmx256m", *settings, "-cp", f"{jars}/*", "org.elasticmq.server.Main"]
    with serve(command, port, log):
        yield f"http://{HOST}:{port}"


def aws_environment(endpoint: str, service: str) -> dict[str, str]:
    """What boto3 needs to find a service of AWS ("sqs", "s3") at ``endpoint``, and to ask nobody else."""
    return {
        f"AWS_ENDPOINT_URL_{service.upper()}": endpoint,
        "AWS_DEFAULT_REGION": "eu-west-1",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "AWS_EC2_METADATA_DISABLED": "true",
    }


def new_sqs_queue(endpoint: str, name: str, max_receive_count: int = 6, visibility_seconds: int = 900) -> None:
    """A standard queue ``name`` whose dead letters go to ``name``-dead."""
    import boto3

    sqs = boto3.session.Session().client("sqs", endpoint_url=endpoint)
    dead = sqs.create_queue(QueueName=f"{name}-dead")["QueueUrl"]
    arn = sqs.get_queue_attributes(QueueUrl=dead, AttributeNames=["QueueArn"])["Attributes"]["QueueArn"]
    policy = {"deadLetterTargetArn": arn, "maxReceiveCount": max_receive_count}
    attributes = {"RedrivePolicy": json.dumps(policy), "VisibilityTimeout": str(visibility_seconds)}
    sqs.create_queue(QueueName=name, Attributes=attributes)
    sqs.close()
