"""Real servers on loopback, each with its own folder and port. They end with the block that started them.

    python -m tests.harness.servers aws lakeupsert demo --lake s3://lake/demo --queue sqs://lake
    python -m tests.harness.servers azure lakeupsert demo --lake az://lake/demo --queue azqueue://devstoreaccount1/lake

run a command beside an S3 (versitygw) and an SQS (ElasticMQ), or an Azure Storage (Azurite), with a bucket or container and a
queue, both named `lake`.
"""

import importlib.util
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from urllib import request

import pytest

from lakeupsert.queue.azure import POISON
from lakeupsert.storage.azureaccount import EMULATOR
from tests.harness.processes import wait_until

HOST = "127.0.0.1"
PROGRAMS = Path(__file__).parents[2] / "build" / "servers"
"""What `make servers` installs."""
END_SECONDS = 5.0
"""How long a server may take to end after SIGTERM."""
_OF_OTHER_SPARKS = {"3.5": "spark/hadoop-3.3", "4.0": "spark/hadoop-3.4.1"}
HADOOP_JARS = PROGRAMS.parent / _OF_OTHER_SPARKS.get(version("pyspark")[:3], "servers/hadoop")
"""Jars that Spark needs to read S3 and Azure Storage."""
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "access", "AWS_SECRET_ACCESS_KEY": "secret"}
"""For every S3 and SQS server here."""
AZURITE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""The public key of Azurite, valid for nothing else."""


@dataclass(frozen=True)
class Server:
    """A running server.

    Attributes:
        env: the environment variables that clients need.
        root: where an S3 server keeps its buckets as plain folders.
        queues: the queue server that belongs to a blob server.
        process: for tests that kill it.
    """

    port: int
    env: Mapping[str, str]
    root: Path | None = None
    queues: "Server | None" = None
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def new_place(self, name: str) -> str:
        """Create a bucket or container and return its address. This process must have the environment of this server."""
        if "AZURE_STORAGE_CONNECTION_STRING" in self.env:
            new_container(name)
            return f"az://{name}"
        if "STORAGE_EMULATOR_HOST" in self.env:
            body = json.dumps({"name": name}).encode()
            request.urlopen(
                request.Request(f"{self.url}/storage/v1/b", body, {"Content-Type": "application/json"})
            ).close()
            return f"gs://{name}"
        new_bucket(name)
        return f"s3://{name}"


@dataclass(frozen=True)
class Cloud:
    """The servers of a store and of queues. A proxy goes in front of ``store``; ``queue`` creates a queue and returns its
    address."""

    store: Server
    env: Mapping[str, str]
    queue: Callable[[str], str]


def require(path: Path, how: str) -> Path:
    """The server's program. If it is missing, the test fails in CI and is skipped elsewhere; ``how`` says how to get it."""
    if not path.exists():
        reason = f"{path.name} is missing: {how}"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    return path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


@contextmanager
def serve(
    command: Sequence[str | Path], port: int, log: Path, env: Mapping[str, str] = {}
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server on ``port``. The block starts when the server accepts connections."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            list(map(str, command)), stdout=out, stderr=subprocess.STDOUT, env={**os.environ, **env}
        )
    try:

        def listens() -> bool:
            assert process.poll() is None, f"{command[0]} ended by itself: {log.read_text(errors='replace')[-2000:]}"
            with socket.socket() as probe:
                return probe.connect_ex((HOST, port)) == 0

        wait_until(listens, f"{command[0]} accepts connections on port {port}")
        yield process
    finally:
        process.terminate()
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:  # Azurite waits for clients that keep their connections
            process.kill()
            process.wait()


@contextmanager
def moto(env: Mapping[str, str] = {}) -> Iterator[Server]:
    """S3 and SQS in memory. Accepts any credentials."""
    port = free_port()
    command = [sys.executable, "-m", "tests.harness.motoserver", "-H", HOST, "-p", str(port)]
    with tempfile.TemporaryDirectory(prefix="moto-") as folder, serve(command, port, Path(folder) / "log", env):
        yield Server(port, _aws(port))


@contextmanager
def versitygw() -> Iterator[Server]:
    """S3 over a folder, with checked signatures. Objects are plain files, so a test can damage them."""
    program = require(PROGRAMS / "versitygw", "`make servers` builds it (Go)")
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="versitygw-") as folder:
        root = Path(folder) / "buckets"
        root.mkdir()
        access, secret = CREDENTIALS.values()
        env = {"ROOT_ACCESS_KEY": access, "ROOT_SECRET_KEY": secret}
        command: list[str | Path] = [program, "--port", f"{HOST}:{port}", "--keep-alive", "posix", root]
        with serve(command, port, Path(folder) / "log", env):
            yield Server(port, _aws(port), root)


@contextmanager
def elasticmq() -> Iterator[Server]:
    """SQS in memory, with the limits of SQS. Accepts any credentials."""
    jars = require(PROGRAMS / "elasticmq", "`make servers` installs it (Maven)")
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
    java = ["java", "-Xmx256m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC"]
    command = [*java, *settings, "-cp", f"{jars}/*", "org.elasticmq.server.Main"]
    env = _aws(port)
    env["AWS_ENDPOINT_URL_SQS"] = env.pop("AWS_ENDPOINT_URL")  # S3 is another server
    with tempfile.TemporaryDirectory(prefix="elasticmq-") as folder, serve(command, port, Path(folder) / "log"):
        yield Server(port, env)


@contextmanager
def azurite(blob_port: int | None = None) -> Iterator[Server]:
    """Blobs and queues of Azure Storage in a folder, with checked signatures but without a hierarchical namespace."""
    program = (
        require(PROGRAMS / "azurite", "`make servers` installs it (npm)") / "node_modules/azurite/dist/src/azurite.js"
    )
    blobs, queues, tables = blob_port or free_port(), free_port(), free_port()
    ports = ["--blobPort", str(blobs), "--queuePort", str(queues), "--tablePort", str(tables)]
    hosts = [x for service in ("blob", "queue", "table") for x in (f"--{service}Host", HOST)]
    with tempfile.TemporaryDirectory(prefix="azurite-") as folder:
        options = ["--silent", "--skipApiVersionCheck", "--disableTelemetry", "--location", folder, *ports, *hosts]
        command: list[str | Path] = ["node", program, *options]
        with serve(command, queues, Path(folder) / "log"):
            endpoints = {"Blob": blobs, "Queue": queues}
            found = [f"{name}Endpoint=http://{HOST}:{port}/{EMULATOR}" for name, port in endpoints.items()]
            account = [f"AccountName={EMULATOR}", f"AccountKey={AZURITE_KEY}"]
            env = {"AZURE_STORAGE_CONNECTION_STRING": ";".join([*account, *found])}
            yield Server(blobs, env, queues=Server(queues, env))


@contextmanager
def gcs() -> Iterator[Server]:
    """Google Cloud Storage in memory, without credentials."""
    program = require(PROGRAMS / "fake-gcs-server", "`make servers` builds it (Go)")
    port = free_port()
    place = ["-scheme", "http", "-host", HOST, "-port", str(port), "-public-host", f"{HOST}:{port}"]
    command: list[str | Path] = [program, *place, "-backend", "memory"]
    with tempfile.TemporaryDirectory(prefix="gcs-") as folder, serve(command, port, Path(folder) / "log"):
        yield Server(port, {"STORAGE_EMULATOR_HOST": f"http://{HOST}:{port}"})


@contextmanager
def iceberg_rest() -> Iterator[Server]:
    """A REST catalog of Iceberg, without credentials."""
    jars = require(PROGRAMS / "iceberg-rest", "`make servers` installs it (Maven)")
    port = free_port()
    java = ["java", "-Xmx256m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC"]
    with tempfile.TemporaryDirectory(prefix="iceberg-rest-") as folder:
        env = {
            "CATALOG_CATALOG__IMPL": "org.apache.iceberg.jdbc.JdbcCatalog",
            "CATALOG_IO__IMPL": "org.apache.iceberg.hadoop.HadoopFileIO",
            "CATALOG_REST_PORT": str(port),
            "CATALOG_URI": f"jdbc:sqlite:{folder}/catalog.db",
            "CATALOG_WAREHOUSE": folder,
        }
        command = [*java, "-cp", f"{jars}/*", "org.apache.iceberg.rest.RESTCatalogServer"]
        with serve(command, port, Path(folder) / "log", env):
            yield Server(port, {})


def _aws(port: int) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": f"http://{HOST}:{port}",
        **CREDENTIALS,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "AWS_EC2_METADATA_DISABLED": "true",
    }


def new_bucket(name: str) -> None:
    """Create a bucket in the S3 of this environment."""
    import boto3

    boto3.client("s3").create_bucket(Bucket=name)


def new_queue(name: str, max_receive_count: int = 6, visibility_seconds: int = 900) -> None:
    """Create a standard queue in the SQS of this environment, and `NAME-dead` for its dead letters."""
    import boto3

    sqs = boto3.client("sqs")
    dead = sqs.create_queue(QueueName=f"{name}-dead")["QueueUrl"]
    arn = sqs.get_queue_attributes(QueueUrl=dead, AttributeNames=["QueueArn"])["Attributes"]["QueueArn"]
    policy = json.dumps({"deadLetterTargetArn": arn, "maxReceiveCount": max_receive_count})
    sqs.create_queue(QueueName=name, Attributes={"RedrivePolicy": policy, "VisibilityTimeout": str(visibility_seconds)})


def new_container(name: str) -> None:
    """Create a container in the Azure Storage of this environment."""
    from azure.storage.blob import BlobServiceClient

    BlobServiceClient.from_connection_string(os.environ["AZURE_STORAGE_CONNECTION_STRING"]).create_container(name)


def new_azure_queue(name: str) -> None:
    """Create a queue in the Azure Storage of this environment, and a second one for its dead letters."""
    from azure.storage.queue import QueueServiceClient

    service = QueueServiceClient.from_connection_string(os.environ["AZURE_STORAGE_CONNECTION_STRING"])
    for queue in (name, name + POISON):
        service.create_queue(queue)


@contextmanager
def spark_connect() -> Iterator[Server]:
    """Spark Connect, of the first pyspark in the path that has a server: 3.5 has none, and is a client of a newer one here."""
    homes = [Path(folder) / "pyspark" for folder in sys.path]
    home = next(home for home in homes if any(home.glob("jars/spark-connect_*.jar")))
    port = free_port()
    settings = {
        "spark.master": "local[2]",
        "spark.connect.grpc.binding.address": HOST,
        "spark.connect.grpc.binding.port": port,
        "spark.driver.bindAddress": HOST,
        "spark.driver.host": HOST,
        "spark.ui.enabled": "false",
    }
    command: list[str | Path] = [
        home / "bin/spark-submit",
        "--class",
        "org.apache.spark.sql.connect.service.SparkConnectServer",
    ]
    command += [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]
    env = {"SPARK_HOME": str(home), "PYSPARK_PYTHON": str(home.parents[3] / "bin/python")}
    with (
        tempfile.TemporaryDirectory(prefix="spark-connect-") as folder,
        serve([*command, "spark-internal"], port, Path(folder) / "log", env) as process,
    ):
        yield Server(port, {"SPARK_REMOTE": f"sc://{HOST}:{port}"}, process=process)


@contextmanager
def spark_cluster(folder: Path, workers: int = 2) -> Iterator["SparkCluster"]:
    """Spark's own cluster: a master and workers, each a process that keeps what it is sent in a folder of its own."""
    home = Path(pyspark_home())
    port = free_port()
    master: list[str | Path] = [
        home / "bin/spark-class",
        "org.apache.spark.deploy.master.Master",
        "--host",
        HOST,
        "--port",
        str(port),
    ]
    with ExitStack() as stack:
        env = {"SPARK_HOME": str(home), "SPARK_NO_DAEMONIZE": "1", "SPARK_LOCAL_IP": HOST, "SPARK_PUBLIC_DNS": HOST}
        stack.enter_context(serve([*master, "--webui-port", str(free_port())], port, folder / "master.log", env))
        url = f"spark://{HOST}:{port}"
        processes = []
        for number in range(workers):
            own = free_port()
            work = folder / f"worker-{number}"
            command: list[str | Path] = [
                home / "bin/spark-class",
                "org.apache.spark.deploy.worker.Worker",
                "--host",
                HOST,
            ]
            command += ["--port", str(own), "--webui-port", str(free_port()), "--cores", "1", "--memory", "1g"]
            command += ["--work-dir", str(work), url]
            work.mkdir()
            processes.append(stack.enter_context(serve(command, own, folder / f"worker-{number}.log", env)))
        yield SparkCluster(url, home, tuple(processes))


@dataclass(frozen=True)
class SparkCluster:
    """A running cluster: its address, Spark's home, and the processes of its workers."""

    url: str
    home: Path
    workers: tuple[subprocess.Popen[bytes], ...]


def pyspark_home() -> str:
    found = importlib.util.find_spec("pyspark")
    if found is None or not found.submodule_search_locations:
        raise RuntimeError("pyspark is not installed")
    return found.submodule_search_locations[0]


@contextmanager
def aws() -> Iterator[Cloud]:
    def queue(name: str) -> str:
        new_queue(name)
        return f"sqs://{name}"

    with versitygw() as s3, elasticmq() as sqs:
        yield Cloud(s3, {**s3.env, **sqs.env}, queue)


@contextmanager
def azure() -> Iterator[Cloud]:
    def queue(name: str) -> str:
        new_azure_queue(name)
        return f"azqueue://{EMULATOR}/{name}"

    with azurite() as server:
        yield Cloud(server, server.env, queue)


CLOUDS = {"aws": aws, "azure": azure}


def main(arguments: Sequence[str]) -> int:
    """Run a command beside the servers of a cloud, and return its exit code."""
    name, *command = arguments
    with CLOUDS[name]() as cloud:
        os.environ.update(cloud.env)
        cloud.store.new_place("lake")
        cloud.queue("lake")
        return subprocess.call(command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
