"""A broker of Kafka on loopback, which is its own controller and keeps its messages when it is stopped or killed."""

import subprocess
import uuid
from contextlib import ExitStack
from pathlib import Path

from tests.harness.servers import HOST, PROGRAMS, free_port, require, serve

_JAVA = ("java", "-Xmx384m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC")
_SETTINGS = {
    "process.roles": "broker,controller",
    "node.id": 1,
    "controller.listener.names": "CONTROLLER",
    "offsets.topic.replication.factor": 1,
    "transaction.state.log.replication.factor": 1,
    "transaction.state.log.min.isr": 1,
    "transaction.state.log.num.partitions": 1,
    "offsets.topic.num.partitions": 1,
    "auto.create.topics.enable": "false",
    # What retention and compaction take minutes for, within a second.
    "log.cleaner.backoff.ms": 100,
    "log.retention.check.interval.ms": 200,
    "log.initial.task.delay.ms": 100,
    "log.segment.delete.delay.ms": 100,
    "log.cleaner.dedupe.buffer.size": 4 << 20,
    "num.network.threads": 1,
    "num.io.threads": 2,
}


class Broker:
    """Use it as a context; `kill` and `start` in between are a crash and what follows.

    With ``login``, a user and a password, it also listens at `secure`, by TLS with `certificate`.
    """

    def __init__(self, folder: Path, login: tuple[str, str] | None = None) -> None:
        self.jars = require(PROGRAMS / "kafka", "`make servers` installs it (Maven)")
        self.folder, self.port, controller = folder, free_port(), free_port()
        self.address = f"{HOST}:{self.port}"
        places = {
            "listeners": f"PLAINTEXT://{self.address},CONTROLLER://{HOST}:{controller}",
            "advertised.listeners": f"PLAINTEXT://{self.address}",
            "controller.quorum.voters": f"1@{HOST}:{controller}",
            "log.dirs": folder / "messages",
        }
        folder.mkdir(parents=True, exist_ok=True)
        scram = []
        if login:
            places |= self._secure(*login, listeners=places)
            scram = ["--add-scram", "SCRAM-SHA-512=[name={},password={}]".format(*login)]
        self._settings = folder / "server.properties"
        self._settings.write_text("".join(f"{name}={value}\n" for name, value in {**_SETTINGS, **places}.items()))
        tool = [*self._java("kafka.tools.StorageTool"), "format", "--config", str(self._settings)]
        subprocess.run([*tool, *scram, "--cluster-id", uuid.uuid4().hex[:22]], check=True, capture_output=True)
        self._running = ExitStack()

    def _secure(self, user: str, password: str, listeners: dict[str, object]) -> dict[str, object]:
        """The settings of another listener, with SASL and TLS."""
        self.secure, self.certificate = f"localhost:{free_port()}", self.folder / "certificate.pem"
        key, both = self.folder / "key.pem", self.folder / "both.pem"
        made = "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=DNS:localhost"
        command = ["openssl", *made.split(), "-keyout", str(key), "-out", str(self.certificate)]
        subprocess.run(command, check=True, capture_output=True)
        both.write_bytes(key.read_bytes() + self.certificate.read_bytes())
        modules, of = "org.apache.kafka.common.security", "listener.name.sasl_ssl"
        return {
            **{name: f"{listeners[name]},SASL_SSL://{self.secure}" for name in ("listeners", "advertised.listeners")},
            "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,SASL_SSL:SASL_SSL",
            "sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-512",
            f"{of}.plain.sasl.jaas.config": f'{modules}.plain.PlainLoginModule required user_{user}="{password}";',
            f"{of}.scram-sha-512.sasl.jaas.config": f"{modules}.scram.ScramLoginModule required;",
            f"{of}.ssl.keystore.type": "PEM",
            f"{of}.ssl.keystore.location": both,
        }

    def _java(self, program: str) -> list[str]:
        return [*_JAVA, "-cp", f"{self.jars}/*", program]

    def start(self) -> None:
        command = [*self._java("kafka.Kafka"), str(self._settings)]
        self.process = self._running.enter_context(serve(command, self.port, self.folder / "log"))

    def stop(self) -> None:
        self._running.close()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._running.close()

    def __enter__(self) -> "Broker":
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()
