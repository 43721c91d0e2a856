"""A real PostgreSQL as the warehouse: exactly once whatever is killed, upserts, bad tables, wrong passwords."""

import random
import signal
from collections import Counter
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

import dovetail as dt
from dovetail.core.errors import PlanError, StateError
from dovetail.testing.faults import load_program
from dovetail.testing.flows import Feed, wait_until

PROGRAM = Path(__file__).with_name("load_victim.py")
SEED = 60_013
POINTS = [
    "sink.postgres.moved",
    "sink.postgres.published",
    "sink.postgres.copied",
    "kept.fold.after",
    "sink.postgres.staging",
    "flow.commit.linked",
    "sink.postgres.publish",
    "flow.job.after",
    "flow.commit.before",
    "state.file.written",
    "flow.intent.after",
    "kept.fold.before",
    "flow.task.trailer",
    "flow.publish.after",
]


VICTIM = load_program(PROGRAM)
COLUMNS = "n bigint, source text, order_id bigint, customer bigint, city text, sk bigint"


def sink(postgres: Any, table: str, **options: Any) -> Any:
    login = postgres.login(**options.pop("login", {}))
    names = {"database": login["dbname"], **{name: login[name] for name in ("host", "port", "user", "password")}}
    return dt.sinks.postgres(table, **names, **options)


def test_table_written_from_files_survives_a_restart_of_the_database(
    postgres: Any, make_driver: Any, tmp_path: Path
) -> None:
    postgres.execute(f"CREATE TABLE restarted ({COLUMNS})")
    feed = Feed(tmp_path / "feed")
    for number in range(4):
        feed.add(VICTIM.orders(number))
    (tmp_path / "password").write_text(postgres.password)
    driver = make_driver(PROGRAM, [str(tmp_path), str(postgres.port), "restarted"], tmp_path / "log")

    def restart() -> None:
        driver.wait_until_started()
        postgres.stop("immediate")
        postgres.start()

    assert driver.run(while_running=restart) in (VICTIM.FAILED, VICTIM.DONE), driver.said()
    assert driver.run() == VICTIM.DONE, driver.said()
    require_loaded(postgres, "restarted", feed.rows())


def test_topic_is_loaded_exactly_once_however_often_the_driver_is_killed(
    postgres: Any, kafka: Any, spark: SparkSession, connector_jars: list[str], make_driver: Any, tmp_path: Path,
    service_kills: int,
) -> None:  # fmt: skip
    """Kafka, enrich, surrogate key, PostgreSQL."""
    print("seed", SEED)
    chance = random.Random(SEED)
    postgres.execute(f"CREATE TABLE orders ({COLUMNS})")
    before = staging_tables(postgres)
    (tmp_path / "password").write_text(postgres.password)
    (tmp_path / "topic").write_text(f"{kafka.servers} orders")
    (tmp_path / "jars").write_text(",".join(connector_jars))
    driver = make_driver(PROGRAM, [str(tmp_path), str(postgres.port), "orders"], tmp_path / "log")
    ends: Counter[int] = Counter()
    sent: list[dict[str, Any]] = []

    def send(files: int) -> None:
        for _ in range(files):
            table = VICTIM.orders(len(sent) // VICTIM.ROWS_PER_FILE)
            sent.extend(table.to_pylist())
            kafka.send(spark.createDataFrame(table).select(F.to_json(F.struct("*")).alias("value")), "orders")

    rounds = 0
    while ends[-signal.SIGKILL] + ends[VICTIM.FAILED] < service_kills:
        assert rounds < 2 * service_kills + 2, f"the driver is seldom killed: {ends}"
        send(2)
        if rounds % 5 == 4:
            moment = 4 * chance.random()
            code = driver.run(kill_after_s=moment, while_running=driver.wait_until_started)
        else:
            place = rounds - rounds // 5
            code = driver.run(f"{POINTS[place % len(POINTS)]}:{1 + chance.randrange(2)}")
        assert code in (-signal.SIGKILL, VICTIM.FAILED, VICTIM.DONE), driver.said()
        ends[code] += 1
        rounds += 1
        print(f"round {rounds}: {dict(ends)}", flush=True)
        repeated = postgres.execute("SELECT n, count(*) FROM orders GROUP BY n HAVING count(*) > 1")
        assert repeated == [], "a row was loaded twice"
    send(1)
    assert driver.run() == VICTIM.DONE, driver.said()
    require_loaded(postgres, "orders", sent)
    left = staging_tables(postgres) - before
    assert len(left) <= 1, f"staging tables were left behind: {left}"


def staging_tables(postgres: Any) -> set[str]:
    """Those of all flows; the newest driver of each has one."""
    found = postgres.execute("SELECT table_name FROM information_schema.tables WHERE table_name LIKE 'dovetail\\_%'")
    return {name for (name,) in found} - {"dovetail_flows"}


def require_loaded(postgres: Any, table: str, given: list[dict[str, Any]]) -> None:
    """The table has each row once, with its city and its key."""
    city_of = {row["customer"]: row["city"] for row in VICTIM.CITY_OF}
    expected = {(r["n"], r["source"], r["order_id"], r["customer"], city_of.get(r["customer"])) for r in given}
    loaded = postgres.execute(f"SELECT n, source, order_id, customer, city, sk FROM {table}")
    assert len(loaded) == len(expected)
    assert {row[:5] for row in loaded} == expected
    numbers: dict[Any, int] = {}
    for row in loaded:
        assert numbers.setdefault((row[1], row[2]), row[5]) == row[5], "a source key has two numbers"
    assert len(set(numbers.values())) == len(numbers), "a number was given twice"


@pytest.fixture
def rows(spark: SparkSession) -> Any:
    """Every type that the sink writes, with values that text formats like to spoil."""
    noon, early = datetime(2026, 1, 1, 12, tzinfo=UTC), datetime(1969, 12, 31, 23, 59, 59, 999999, tzinfo=UTC)
    values = [
        (1, 1.5, True, 'a "quoted", text', b"\x00\xff", Decimal("12.340"), date(2026, 2, 28), noon),
        (2, None, None, None, None, None, None, None),
        (3, float("inf"), False, "", b"", Decimal("-0.001"), date(1, 1, 1), early),
        (4, -0.0, True, "line\nbreak \\N \\. ü", b"\\x41", Decimal(0), date(9999, 12, 31), noon),
    ]
    schema = "id long, d double, b boolean, t text, x binary, m decimal(10,3), day date, at timestamp"
    return spark.createDataFrame(values, schema.replace("text", "string"))


def flow_of(spark: SparkSession, tmp_path: Path, df: Any) -> Any:
    """A flow over the rows of a DataFrame."""
    df.write.mode("append").parquet(str(tmp_path / "feed"))
    return dt.stream(spark.readStream.schema(df.schema).parquet(str(tmp_path / "feed")), "types")


def run(flow: Any, to: Any, tmp_path: Path) -> None:
    flow.write(to, checkpoint=tmp_path / "ckpt", trigger="available-now").awaitTermination()


def test_every_type_arrives_as_it_was_and_upserts_replace(
    postgres: Any, spark: SparkSession, tmp_path: Path, rows: Any
) -> None:
    kinds = "id bigint PRIMARY KEY, d float8, b boolean, t text, x bytea, m numeric(10,3), day date, at timestamptz"
    postgres.execute(f"CREATE TABLE typed ({kinds})")
    run(flow_of(spark, tmp_path, rows), sink(postgres, "typed", key="id"), tmp_path)
    found = {row[0]: row for row in postgres.execute("SELECT * FROM typed")}
    expected = {row["id"]: (*row[:4], None if row[4] is None else bytes(row[4]), *row[5:]) for row in rows.collect()}
    for key, row in expected.items():
        moment = None if row[7] is None else row[7].astimezone(UTC)
        assert (*found[key][:7],) == (*row[:7],)
        assert found[key][7] == moment
    changed = rows.where("id < 3").withColumn("t", F.lit("changed"))
    run(flow_of(spark, tmp_path, changed), sink(postgres, "typed", key="id"), tmp_path)
    texts = dict(postgres.execute("SELECT id, t FROM typed"))
    assert texts == {1: "changed", 2: "changed", 3: "", 4: "line\nbreak \\N \\. ü"}


def test_table_that_does_not_fit_is_refused_and_the_flow_goes_on_when_it_does(
    postgres: Any, spark: SparkSession, tmp_path: Path
) -> None:
    flow = flow_of(spark, tmp_path, spark.range(5).withColumn("v", F.lit("long")))
    with pytest.raises(PlanError, match="There is no table 'narrow'"):
        run(flow, sink(postgres, "narrow"), tmp_path)
    postgres.execute("CREATE TABLE narrow (id bigint)")
    with pytest.raises(PlanError, match="no column 'v'; it has id"):
        run(flow, sink(postgres, "narrow"), tmp_path)
    postgres.execute("ALTER TABLE narrow ADD COLUMN v varchar(2)")
    with pytest.raises(PlanError, match="no unique index on"):
        run(flow, sink(postgres, "narrow", key="id"), tmp_path)
    with pytest.raises(Exception, match="value too long"):
        run(flow, sink(postgres, "narrow"), tmp_path)
    postgres.execute("ALTER TABLE narrow ALTER COLUMN v TYPE text")
    run(flow, sink(postgres, "narrow"), tmp_path)
    assert postgres.execute("SELECT count(*) FROM narrow") == [(5,)]


def test_database_that_is_gone_is_an_error_and_nothing_is_lost(
    postgres: Any, spark: SparkSession, tmp_path: Path
) -> None:
    postgres.execute("CREATE TABLE gone (id bigint)")
    flow = flow_of(spark, tmp_path, spark.range(3))
    to = sink(postgres, "gone")
    query = flow.write(to, checkpoint=tmp_path / "ckpt")
    postgres.stop("immediate")
    try:
        wait_until(lambda: not query.isActive, "the flow to notice")
        assert isinstance(query.exception(), StateError | PySparkException | Py4JJavaError)
    finally:
        query.stop()
        postgres.start()
    run(flow, to, tmp_path)
    assert sorted(postgres.execute("SELECT id FROM gone")) == [(0,), (1,), (2,)]
