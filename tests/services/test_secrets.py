"""A pipeline with every kind of secret, on real services: none of them is in anything that anybody can read later."""

import json
import os
import secrets
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from dovetail.testing.faults import load_program
from dovetail.testing.flows import commits_of

SERVERS = load_program(Path(__file__).with_name("servers.py"))

PIPELINE = """\
name: secret
checkpoint: ckpt
trigger: available-now
sources:
  events:
    format: kafka
    servers: {servers}
    topic: secret
    schema: id bigint
    options:
      kafka.sasl.jaas.config: {{env: BROKER_LOGIN}}
      kafka.ssl.keystore.password: {{env: KEYSTORE_PASSWORD}}
relations:
  customers:
    path: customers
    build:
      format: jdbc
      url: jdbc:postgresql://127.0.0.1:{port}/postgres
      table: customers
      user: etl
      password: {{file: password}}
      on: id
      shards: 2
steps:
  - enrich: {{relation: customers, on: id, how: left}}
sink:
  format: postgres
  host: 127.0.0.1
  port: {port}
  database: postgres
  table: secret
  user: etl
  password: {{env: WAREHOUSE_PASSWORD}}
"""
# Everything that Spark and Kafka's client have to say, in a file.
LOGGING = """\
appender.file.type = File
appender.file.name = file
appender.file.fileName = {log}
appender.file.layout.type = PatternLayout
appender.file.layout.pattern = %c %m%n%ex
rootLogger.level = info
rootLogger.appenderRef.file.ref = file
"""


@pytest.fixture
def dovetail(tmp_path: Path, connector_jars: list[str]) -> Any:
    """Runs the command in a process of its own, with Spark's logs and its history of events in files."""
    (tmp_path / "events").mkdir()
    (tmp_path / "logging.properties").write_text(LOGGING.format(log=tmp_path / "spark.log"))
    settings = {
        "spark.eventLog.enabled": "true",
        "spark.eventLog.compress": "false",
        "spark.eventLog.dir": f"file:{tmp_path / 'events'}",
        "spark.log.level": "INFO",
        "spark.driver.memory": "512m",
        "spark.sql.shuffle.partitions": "2",
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC "
        f"-Dlog4j2.configurationFile={tmp_path / 'logging.properties'}",
    }
    spark = [part for name, value in settings.items() for part in ("--conf", f"{name}={value}")]
    spark += ["--master", "local[2]", "--jars", str(Path(connector_jars[0]).parent)]

    def run(command: str, *more: str, environment: dict[str, str]) -> tuple[int, str]:
        options = spark if command in ("run", "explain") else []
        finished = subprocess.run(
            [sys.executable, "-m", "dovetail.cli.main", command, "p.yaml", *options, *more],
            cwd=tmp_path, env={**os.environ, **environment}, capture_output=True, text=True, check=False, timeout=600,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        return finished.returncode, finished.stdout + finished.stderr

    return run


def test_secrets_are_nowhere_to_be_seen(
    postgres: Any, kafka: Any, spark: SparkSession, tmp_path: Path, dovetail: Any
) -> None:
    broker_password, keystore_password = f"jaas-{secrets.token_hex(8)}", f"keys-{secrets.token_hex(8)}"
    login = "org.apache.kafka.common.security.plain.PlainLoginModule required"
    good = {
        "BROKER_LOGIN": f'{login} username="u" password="{broker_password}";',
        "KEYSTORE_PASSWORD": keystore_password,
        "WAREHOUSE_PASSWORD": postgres.password,
    }
    (tmp_path / "password").write_text(postgres.password + "\n")
    (tmp_path / "p.yaml").write_text(PIPELINE.format(port=postgres.port, servers=kafka.servers))
    postgres.execute("CREATE TABLE customers (id bigint, city text, rating numeric(6,2), since timestamptz)")
    postgres.execute("INSERT INTO customers VALUES (1, 'Rome', 1.25, '2026-01-01 00:00+00'), (2, NULL, NULL, NULL)")
    kafka.send(spark.createDataFrame([(json.dumps({"id": n}),) for n in range(4)], "value string"), "secret")

    wrong = {**good, "WAREHOUSE_PASSWORD": f"wrong-{postgres.password}"}
    shown = []
    for command in ("check", "run"):
        code, text = dovetail(command, "--debug", environment=wrong)
        assert code == 2
        assert "p.yaml:26" in text
        assert "password authentication failed" in text
        shown.append(text)
    assert not (tmp_path / "ckpt").exists(), "a query was started"

    code, text = dovetail("run", "--debug", environment=good)
    assert code == 2
    assert "There is no table 'secret'" in text
    shown.append(text)
    postgres.execute("CREATE TABLE secret (id bigint, city text, rating numeric(6,2), since timestamptz)")
    for command in ("check", "explain", "run", "status"):
        code, text = dovetail(command, "--json", environment=good)
        assert code == 0, text
        shown.append(text)
    loaded = postgres.execute("SELECT id, city, rating::text FROM secret ORDER BY id")
    assert loaded == [(0, None, None), (1, "Rome", "1.25"), (2, None, None), (3, None, None)]
    assert commits_of(tmp_path / "ckpt")

    (tmp_path / "password").unlink()
    (tmp_path / "shown").write_text("\n".join(shown))
    written = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    logs = {path.name: text for path, text in written.items() if "events" in path.parts or path.name == "spark.log"}
    assert any(b"SparkListenerSQLExecutionStart" in text for text in logs.values()), "there are plans to look at"
    assert b"ConsumerConfig values" in logs["spark.log"], "there are logs of Kafka's client to look at"
    assert b"kafka.sasl.jaas.config" in written[tmp_path / "p.yaml"]
    for path, text in written.items():
        for secret in (postgres.password, broker_password, keystore_password):
            assert secret.encode() not in text, path


INTO_KAFKA = """\
name: secret
checkpoint: ckpt
trigger: available-now
sources:
  rows: {{format: json, path: feed, schema: id bigint}}
sink:
  format: kafka
  servers: {servers}
  topic: secret
  options:
    kafka.security.protocol: SASL_SSL
    kafka.sasl.mechanism: PLAIN
    kafka.sasl.jaas.config: {{env: BROKER_LOGIN}}
    kafka.ssl.truststore.type: PEM
    kafka.ssl.truststore.location: {authority}
    kafka.max.block.ms: 20000
"""
MODULE = "org.apache.kafka.common.security.plain.PlainLoginModule required"


def test_broker_with_tls_and_a_login_is_written_to_and_its_secrets_are_nowhere_to_be_seen(
    certificates: Path, spark: SparkSession, tmp_path: Path, dovetail: Any
) -> None:
    broker_password, wrong_password = (f"{name}-{secrets.token_hex(8)}" for name in ("jaas", "wrong"))
    users = f'username="admin" password="{broker_password}" user_admin="{broker_password}" user_etl="{broker_password}"'
    pair = tmp_path.parent / f"{tmp_path.name}.pem"
    pair.write_text((certificates / "server.key").read_text() + (certificates / "server.pem").read_text())
    security = {
        "sasl.enabled.mechanisms": "PLAIN",
        "sasl.mechanism.inter.broker.protocol": "PLAIN",
        "listener.name.sasl_ssl.plain.sasl.jaas.config": f"{MODULE} {users};",
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": pair,
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": certificates / "authority.pem",
    }
    with SERVERS.running_broker(protocol="SASL_SSL", security=security) as broker:
        text = INTO_KAFKA.format(servers=broker.servers, authority=certificates / "authority.pem")
        (tmp_path / "p.yaml").write_text(text)
        (tmp_path / "feed").mkdir()
        (tmp_path / "feed" / "rows.json").write_text("".join(f'{{"id": {n}}}\n' for n in range(4)))

        def environment(password: str) -> dict[str, str]:
            return {"BROKER_LOGIN": f'{MODULE} username="etl" password="{password}";'}

        shown = []
        code, said = dovetail("run", "--debug", environment=environment(wrong_password))
        assert code != 0
        assert "Authentication failed" in said
        shown.append(said)
        for command in ("check", "explain", "run", "status"):
            code, said = dovetail(command, "--json", environment=environment(broker_password))
            assert code == 0, said
            shown.append(said)
        options = dict(_options(text))
        options["kafka.sasl.jaas.config"] = environment(broker_password)["BROKER_LOGIN"]
        reader = spark.read.format("kafka").option("kafka.bootstrap.servers", broker.servers).options(**options)
        records = reader.option("subscribe", "secret").load().collect()
        assert sorted(json.loads(record["value"])["id"] for record in records) == [0, 1, 2, 3]
    (tmp_path / "shown").write_text("\n".join(shown))
    written = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert b"ProducerConfig values" in written[tmp_path / "spark.log"], "there are logs of Kafka's client to look at"
    for path, content in written.items():
        for secret in (broker_password, wrong_password):
            assert secret.encode() not in content, path


def _options(text: str) -> list[tuple[str, str]]:
    """The plain options of the sink in a pipeline file."""
    lines = [line.strip().partition(": ") for line in text.splitlines() if line.startswith("    kafka.")]
    return [(name, value) for name, _, value in lines if not value.startswith("{")]
