"""PostgreSQL behind TLS: certificates of a real authority, made here, and a server that takes no plain connection."""

import os
import pwd
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import dovetail as dt
from dovetail.cli.main import main
from dovetail.core.errors import PlanError
from dovetail.testing.faults import load_program

SERVERS = load_program(Path(__file__).with_name("servers.py"))
ACCESS = """\
local all all trust
hostssl all clerk 127.0.0.1/32 cert
hostssl all all 127.0.0.1/32 scram-sha-256
"""


@pytest.fixture(scope="module")
def server(certificates: Path) -> Iterator[Any]:
    """A server that takes no connection without TLS."""
    directory = Path(tempfile.mkdtemp(prefix="dovetail-postgres-"))
    server = SERVERS.Postgres(directory, SERVERS.postgres_programs(), SERVERS.free_port())
    try:
        server.create()
        for name in ("server.pem", "server.key", "authority.pem"):
            shutil.copy(certificates / name, directory / name)
            if os.geteuid() == 0:
                owner = pwd.getpwnam("postgres")
                os.chown(directory / name, owner.pw_uid, owner.pw_gid)
        (directory / "data" / "pg_hba.conf").write_text(ACCESS)
        with open(directory / "data" / "postgresql.conf", "a") as settings:
            files = {"ssl_cert_file": "server.pem", "ssl_key_file": "server.key", "ssl_ca_file": "authority.pem"}
            settings.write("ssl = on\n")
            settings.writelines(f"{name} = '{directory / file}'\n" for name, file in files.items())
        server.start()
        server.execute("CREATE USER clerk SUPERUSER")
        yield server
        server.stop("immediate")
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def load(server: Any, spark: SparkSession, tmp_path: Path) -> Any:
    """Loads three rows into a new table, by the sink that a test makes."""
    table = f"t_{tmp_path.name.lower()}"
    spark.range(3).write.parquet(str(tmp_path / "feed"))
    flow = dt.stream(spark.readStream.schema("id long").parquet(str(tmp_path / "feed")), "tls")
    server.execute(f"CREATE TABLE {table} (id bigint)")

    def run(make: Any) -> list[tuple[int]]:
        flow.write(make(table), checkpoint=tmp_path / "ckpt", trigger="available-now").awaitTermination()
        return sorted(server.execute(f"SELECT id FROM {table}"))

    return run


def login(server: Any, **changes: Any) -> dict[str, Any]:
    """Options of the sink."""
    named = {"host": "127.0.0.1", "port": server.port, "database": "postgres", "user": "etl"}
    return {**named, "password": server.password, **changes}


LOADED = [(0,), (1,), (2,)]


def test_server_that_proves_its_name_is_written_to(server: Any, certificates: Path, load: Any) -> None:
    trusted = {"sslmode": "verify-full", "sslrootcert": certificates / "authority.pem"}
    assert load(lambda table: dt.sinks.postgres(table, **login(server), **trusted)) == LOADED


def test_client_proves_its_name_by_a_certificate_and_needs_no_password(
    server: Any, certificates: Path, load: Any
) -> None:
    files = {"sslcert": certificates / "clerk.pem", "sslkey": certificates / "clerk.key"}
    options = login(server, user="clerk", password=None, sslmode="require", **files)
    assert load(lambda table: dt.sinks.postgres(table, **options)) == LOADED


def test_address_of_jdbc_with_parameters_is_understood(server: Any, certificates: Path, load: Any) -> None:
    address = f"jdbc:postgresql://127.0.0.1:{server.port}/postgres"
    parameters = f"?ssl=true&sslrootcert={certificates / 'authority.pem'}&user=etl"
    assert load(lambda table: dt.sinks.jdbc(address + parameters, table, password=server.password)) == LOADED


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"sslmode": "disable"}, "no encryption"),
        ({"sslmode": "verify-full", "sslrootcert": "stranger.pem"}, "certificate verify failed"),
        ({"sslmode": "verify-full", "sslrootcert": "authority.pem", "host": "localhost"}, "does not match host name"),
        ({"sslmode": "require", "user": "clerk", "password": None}, "certificate"),
    ],
)
def test_connection_that_is_not_safe_is_refused_and_says_why(
    server: Any, certificates: Path, load: Any, options: dict[str, Any], why: str
) -> None:
    named = {k: certificates / v if k == "sslrootcert" else v for k, v in options.items()}
    with pytest.raises(PlanError, match=why) as refused:
        load(lambda table: dt.sinks.postgres(table, **login(server, **named)))
    assert server.password not in str(refused.value)
    assert "options of TLS" in str(refused.value)


def test_pipeline_file_names_its_certificates_from_where_it_lies(
    server: Any, certificates: Path, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.setenv("WAREHOUSE_PASSWORD", server.password)
    shutil.copy(certificates / "authority.pem", tmp_path / "trusted.pem")
    spark.range(3).write.json(str(tmp_path / "feed"))
    server.execute("CREATE TABLE by_file (id bigint)")
    (tmp_path / "p.yaml").write_text(f"""\
name: by_file
checkpoint: ckpt
trigger: available-now
sources:
  rows: {{format: json, path: feed, schema: id bigint}}
sink:
  format: postgres
  host: 127.0.0.1
  port: {server.port}
  database: postgres
  table: by_file
  user: etl
  password: {{env: WAREHOUSE_PASSWORD}}
  sslmode: verify-full
  sslrootcert: trusted.pem
""")
    assert main(["check", str(tmp_path / "p.yaml")]) == 0, capfd.readouterr()
    assert main(["run", str(tmp_path / "p.yaml")]) == 0, capfd.readouterr()
    assert sorted(server.execute("SELECT id FROM by_file")) == LOADED
    shutil.copy(certificates / "stranger.pem", tmp_path / "trusted.pem")
    assert main(["check", str(tmp_path / "p.yaml")]) == 2
    assert "certificate verify failed" in capfd.readouterr().err
