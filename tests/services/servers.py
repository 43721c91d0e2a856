"""Real services on loopback, installed if need be, each in a temporary directory and under a user of its own.

Loaded by the suites that need them: the fixtures below are those of their conftest.
"""

import glob
import os
import pwd
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
import pytest
from pyspark.sql import DataFrame, SparkSession

PROJECT = Path(__file__).parents[2]
_PARTITIONS = 2


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def postgres_programs() -> Path:
    """The directory of the distribution's PostgreSQL server, which is installed if it is not there."""
    for _ in range(2):
        found = sorted(glob.glob("/usr/lib/postgresql/*/bin/initdb"))
        if found:
            return Path(found[-1]).parent
        subprocess.run([PROJECT / "scripts" / "apt-install", "postgresql"], check=True)
    raise AssertionError("PostgreSQL was installed, but its programs are not where Debian puts them.")


@dataclass
class Postgres:
    """A PostgreSQL server with a database and a user ``etl`` whose password nobody else knows."""

    directory: Path
    programs: Path
    port: int
    password: str = field(default_factory=lambda: f"pw-{secrets.token_hex(12)}")

    def start(self) -> None:
        """Start it, and wait until it takes connections."""
        options = f"-p {self.port} -c listen_addresses=127.0.0.1 -c unix_socket_directories={self.directory}"
        self._run("pg_ctl", "-D", self.directory / "data", "-w", "-l", self.directory / "log", "-o", options, "start")

    def stop(self, mode: str = "fast") -> None:
        """Stop it; ``immediate`` is as good as a power cut."""
        self._run("pg_ctl", "-D", self.directory / "data", "-w", "-m", mode, "stop")

    def login(self, **changes: Any) -> dict[str, Any]:
        """How to connect."""
        return {
            "host": "127.0.0.1",
            "port": self.port,
            "dbname": "postgres",
            "user": "etl",
            "password": self.password,
            **changes,
        }

    def execute(self, statement: str) -> list[tuple[Any, ...]]:
        """Run a statement; gives its rows, if it has any."""
        with psycopg.connect(**self.login(), autocommit=True) as connection:
            cursor = connection.execute(statement)  # type: ignore[arg-type]
            return cursor.fetchall() if cursor.description else []

    def _run(self, program: str, *arguments: object) -> None:
        # A server refuses to run as root; the package has made a user for it.
        user = "postgres" if os.geteuid() == 0 else None
        command = [str(self.programs / program), *map(str, arguments)]
        finished = subprocess.run(
            command, user=user, group=user, extra_groups=[] if user else None, cwd="/", capture_output=False,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False,
        )  # fmt: skip
        assert finished.returncode == 0, f"{command} failed: {self._log()}"

    def _log(self) -> str:
        log = self.directory / "log"
        return log.read_text()[-2000:] if log.exists() else ""

    def create(self) -> None:
        """Make the database's files."""
        password = self.directory / "password"
        password.write_text(self.password)
        if os.geteuid() == 0:
            owner = pwd.getpwnam("postgres")
            for path in (self.directory, password):
                os.chown(path, owner.pw_uid, owner.pw_gid)
        where = ("-D", self.directory / "data")
        self._run("initdb", *where, "-U", "etl", "--auth=scram-sha-256", f"--pwfile={password}", "--no-sync")


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """A running server, gone at the end."""
    programs = postgres_programs()
    directory = Path(tempfile.mkdtemp(prefix="dovetail-postgres-"))
    server = Postgres(directory, programs, free_port())
    try:
        server.create()
        server.start()
        yield server
        server.stop("immediate")
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def certificate(directory: Path, name: str, subject: str, *options: str, signed_by: str | None = None) -> None:
    """Make a key and a certificate; signed by itself, or by another one of the directory."""
    where = ["-keyout", f"{name}.key", "-out", f"{name}.pem", "-subj", f"/CN={subject}", "-days", "2"]
    by = [] if signed_by is None else ["-CA", f"{signed_by}.pem", "-CAkey", f"{signed_by}.key"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", *where, *by, *options]
    subprocess.run(command, cwd=directory, check=True, capture_output=True)
    (directory / f"{name}.key").chmod(0o600)


@pytest.fixture(scope="session")
def certificates() -> Iterator[Path]:
    """Certificates of an authority, of a server at 127.0.0.1, of a client named clerk, and of somebody else."""
    directory = Path(tempfile.mkdtemp(prefix="dovetail-tls-"))
    certificate(directory, "authority", "authority")
    certificate(directory, "stranger", "stranger")
    leaf = ("-addext", "basicConstraints=critical,CA:FALSE")
    certificate(
        directory, "server", "server", "-addext", "subjectAltName=IP:127.0.0.1", *leaf, signed_by="authority"
    )  # fmt: skip
    certificate(directory, "clerk", "clerk", *leaf, signed_by="authority")
    yield directory
    shutil.rmtree(directory)


def fetched(directory: Path, *arguments: str) -> list[str]:
    """The jars of `connectors/pom.xml`, fetched once."""
    marker, wanted = directory / ".complete", (PROJECT / "connectors" / "pom.xml").read_text()
    if not marker.exists() or marker.read_text() != wanted:
        for old in directory.glob("*.jar"):
            old.unlink()
        subprocess.run([PROJECT / "scripts" / "fetch-jars", directory, *arguments], check=True)
        marker.write_text(wanted)
    return sorted(map(str, directory.glob("*.jar")))


@pytest.fixture(scope="session")
def connector_jars() -> list[str]:
    """What Spark needs to read and write Kafka, and to read PostgreSQL."""
    return fetched(PROJECT / "jars")


@dataclass
class Kafka:
    """A broker that is its own controller."""

    directory: Path
    jars: list[str]
    port: int = field(default_factory=free_port)
    protocol: str = "PLAINTEXT"
    security: dict[str, Any] = field(default_factory=dict)
    process: "subprocess.Popen[bytes] | None" = None

    @property
    def servers(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        """Format its directory, start it, and wait until it answers."""
        controller = free_port()
        settings = {
            "process.roles": "broker,controller",
            "node.id": 1,
            "controller.quorum.voters": f"1@127.0.0.1:{controller}",
            "listeners": f"{self.protocol}://{self.servers},CONTROLLER://127.0.0.1:{controller}",
            "advertised.listeners": f"{self.protocol}://{self.servers}",
            "controller.listener.names": "CONTROLLER",
            "listener.security.protocol.map": f"CONTROLLER:PLAINTEXT,{self.protocol}:{self.protocol}",
            "security.inter.broker.protocol": self.protocol,
            "log.dirs": self.directory / "data",
            "offsets.topic.replication.factor": 1,
            "transaction.state.log.replication.factor": 1,
            "transaction.state.log.min.isr": 1,
            "group.initial.rebalance.delay.ms": 0,
            # A machine that stalls for some seconds must not fence its only broker: producers then wait in vain.
            "broker.session.timeout.ms": 60_000,
            "controller.quorum.fetch.timeout.ms": 30_000,
            "controller.quorum.request.timeout.ms": 30_000,
            "num.partitions": _PARTITIONS,
            **self.security,
        }
        properties = self.directory / "server.properties"
        properties.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
        home = os.environ.get("JAVA_HOME")
        java = [
            f"{home}/bin/java" if home else "java",
            "-Xmx512m",
            "-XX:TieredStopAtLevel=1",
            "-cp",
            os.pathsep.join(self.jars),
        ]
        formatting = [*java, "kafka.tools.StorageTool", "format", "-t", "dovetailtestclusterid0", "-c", str(properties)]
        subprocess.run(formatting, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        with open(self.directory / "log", "wb") as log:
            self.process = subprocess.Popen(
                [*java, "kafka.Kafka", str(properties)], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        give_up_at = time.monotonic() + 180
        while True:
            with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
                return
            assert self.process.poll() is None, self.said()
            assert time.monotonic() < give_up_at, "the broker does not answer"
            time.sleep(0.1)

    def send(self, rows: DataFrame, topic: str) -> None:
        """Send the texts in a column `value`, and wait until the broker has them."""
        rows.write.format("kafka").option("kafka.bootstrap.servers", self.servers).option("topic", topic).save()

    def lose_records(self, spark: SparkSession, topic: str) -> None:
        """Forget all records of a topic, as a broker does when their time is up."""
        java = spark._jvm
        settings = java.java.util.Properties()
        settings.put("bootstrap.servers", self.servers)
        loader = java.java.lang.Thread.currentThread().getContextClassLoader()
        # Two methods have this name, and py4j sees only one of them.
        kinds = spark.sparkContext._gateway.new_array(java.java.lang.Class, 1)
        kinds[0] = java.java.lang.Long.TYPE
        given = spark.sparkContext._gateway.new_array(java.java.lang.Object, 1)
        given[0] = -1
        records = loader.loadClass("org.apache.kafka.clients.admin.RecordsToDelete")
        everything = records.getMethod("beforeOffset", kinds).invoke(None, given)
        admin = java.org.apache.kafka.clients.admin.AdminClient.create(settings)
        wanted = java.java.util.HashMap()
        for number in range(_PARTITIONS):
            wanted.put(java.org.apache.kafka.common.TopicPartition(topic, number), everything)
        admin.deleteRecords(wanted).all().get()
        admin.close()

    def said(self) -> str:
        """The end of its log."""
        return (self.directory / "log").read_text(errors="replace")[-10_000:]

    def stop(self) -> None:
        """Kill it."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()


@contextmanager
def running_broker(**options: Any) -> Iterator[Kafka]:
    """A broker for the duration of a block."""
    jars = fetched(PROJECT / "jars" / "broker", "-Pbroker")
    directory = Path(tempfile.mkdtemp(prefix="dovetail-kafka-"))
    broker = Kafka(directory, jars, **options)
    try:
        broker.start()
        yield broker
    finally:
        broker.stop()
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="session")
def kafka(request: pytest.FixtureRequest) -> Iterator[Kafka]:
    """A running broker, gone at the end. If a test has failed, what it logged last is printed: it may be the cause."""
    with running_broker() as broker:
        yield broker
        if request.session.testsfailed:
            print(f"The broker's log ends with:\n{broker.said()}")
