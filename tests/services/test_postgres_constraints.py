"""Rows that a table refuses: told with table, constraint and key, before the commit where one row is enough to know."""

from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import dovetail as dt
from dovetail.core.errors import StateError
from dovetail.testing.flows import commits_of


class Load:
    """A flow of ids and amounts into a table."""

    def __init__(self, postgres: Any, spark: SparkSession, root: Path) -> None:
        self.postgres, self.spark, self.root = postgres, spark, root
        self.table = f"t_{root.name.lower()}"

    def give(self, *rows: tuple[int | None, int | None]) -> None:
        df = self.spark.createDataFrame(list(rows), "id long, amount long").coalesce(1)
        df.write.mode("append").parquet(str(self.root / "feed"))

    def run(self, where: str = "true", **options: Any) -> None:
        login = {name: value for name, value in self.postgres.login().items() if name != "dbname"}
        sink = dt.sinks.postgres(self.table, **login, database="postgres", **options)
        source = self.spark.readStream.schema("id long, amount long").parquet(str(self.root / "feed"))
        flow = dt.stream(source, "constraints").transform(lambda rows: rows.where(where))
        flow.write(sink, checkpoint=self.root / "ckpt", trigger="available-now").awaitTermination()

    def rows(self) -> list[tuple[Any, ...]]:
        return sorted(self.postgres.execute(f"SELECT id, amount FROM {self.table}"))

    def create(self, columns: str) -> None:
        self.postgres.execute(f"CREATE TABLE {self.table} ({columns})")


@pytest.fixture
def load(postgres: Any, spark: SparkSession, tmp_path: Path) -> Load:
    return Load(postgres, spark, tmp_path)


@pytest.mark.parametrize(
    ("columns", "bad", "told"),
    [
        ("id bigint, amount bigint NOT NULL", (7, None), [r'null value in column "amount"', r"contains \(7, null\)"]),
        (
            "id bigint, amount bigint CONSTRAINT positive CHECK (amount > 0)",
            (7, -1),
            ["constraint 'positive'", r"contains \(7, -1\)"],
        ),
        ("id bigint, amount smallint", (7, 1 << 40), ["1099511627776", "out of range"]),
    ],
)
def test_row_that_the_table_refuses_by_itself_is_told_before_the_commit(
    load: Load, columns: str, bad: tuple[int, int | None], told: list[str]
) -> None:
    load.create(columns)
    load.give((1, 10), bad)
    for text in told:
        with pytest.raises(StateError, match=text) as refused:
            load.run()
    assert f"The table '{load.table}' refuses a row" in str(refused.value)
    assert "not committed" in str(refused.value)
    assert "dovetail_" not in str(refused.value), "the name of a staging table tells nobody anything"
    assert "with transform or divert" in str(refused.value)
    assert commits_of(load.root / "ckpt") == []
    load.run("id <> 7")  # the way on
    assert load.rows() == [(1, 10)]


def test_key_that_is_there_already_is_told_and_the_flow_goes_on_when_it_is_gone(load: Load) -> None:
    load.create("id bigint CONSTRAINT one_each UNIQUE, amount bigint")
    load.postgres.execute(f"INSERT INTO {load.table} VALUES (2, 0)")
    load.give((1, 10), (2, 20))
    for _ in range(2):
        with pytest.raises(StateError, match=r"constraint 'one_each'.*Key \(id\)=\(2\) already exists") as refused:
            load.run()
    assert "is committed and kept; no row of it is in the table" in str(refused.value)
    assert load.rows() == [(2, 0)]
    load.postgres.execute(f"DELETE FROM {load.table} WHERE id = 2")  # the way on
    load.give((3, 30))
    load.run()
    assert load.rows() == [(1, 10), (2, 20), (3, 30)]


def test_key_that_is_there_already_is_replaced_by_a_flow_that_is_given_the_key(load: Load) -> None:
    load.create("id bigint UNIQUE, amount bigint")
    load.postgres.execute(f"INSERT INTO {load.table} VALUES (2, 0)")
    load.give((1, 10), (2, 20))
    with pytest.raises(StateError, match="With key= rows replace"):
        load.run()
    load.run(key="id")
    assert load.rows() == [(1, 10), (2, 20)]


def test_columns_that_the_table_fills_itself_are_no_hindrance(load: Load) -> None:
    load.create(
        "n bigint GENERATED ALWAYS AS IDENTITY, serial_n serial, at timestamptz NOT NULL DEFAULT now(), id bigint, "
        "amount bigint, twice bigint NOT NULL GENERATED ALWAYS AS (amount * 2) STORED"
    )
    load.give((1, 10), (2, 20))
    load.run()
    assert load.rows() == [(1, 10), (2, 20)]
    found = load.postgres.execute(f"SELECT count(DISTINCT n), count(DISTINCT serial_n), sum(twice) FROM {load.table}")
    assert found == [(2, 2, 60)]


def test_trigger_that_puts_rows_right_is_not_forestalled(load: Load) -> None:
    load.create("id bigint, amount bigint NOT NULL")
    load.postgres.execute(
        "CREATE FUNCTION put_right() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN NEW.amount := coalesce(NEW.amount, 0); RETURN NEW; END $$"
    )
    load.postgres.execute(f"CREATE TRIGGER t BEFORE INSERT ON {load.table} FOR EACH ROW EXECUTE FUNCTION put_right()")
    load.give((1, None))
    load.run()
    assert load.rows() == [(1, 0)]
