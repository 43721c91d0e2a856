"""The queries, for every engine. Imports nothing but the standard library: PyFlink's interpreter reads it, too.

A query is written three times: as a flow of Dovetail, as Spark's own join, and as SQL, which Flink runs, and DuckDB as
the oracle. Results have the same columns everywhere; times are milliseconds. ``latest`` is the time of the latest
event of a result, from which latencies are taken.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Frames = Mapping[str, Any]  # streaming DataFrames by kind of event
WINDOW_MS = 10_000
LARGE_KEY = "mod(auction * 2654435 + bidder * 40503, {rows})"  # spreads bids over a large side input


@dataclass(frozen=True)
class Query:
    """A query of the suite, or what is left of it when only the join is meant."""

    name: str
    title: str
    inputs: tuple[str, ...]  # kinds of event
    columns: str  # of the result, as Flink declares them
    sql: str  # for DuckDB; for Flink, too, if there is no other text
    dovetail: Callable[..., Any]  # of the frames, a Flow; for a side input, of the frames and the relation, a DataFrame
    spark: Callable[..., Any]  # a DataFrame
    side: str = ""  # the key of the bid in the side input
    flink_sql: str = ""

    @property
    def is_stateful(self) -> bool:
        """Whether it joins streams with each other."""
        return not self.side

    @property
    def for_flink(self) -> str:
        # The name is a type, too, which Flink's parser would take it for.
        return (self.flink_sql or self.sql).replace("dateTime", "`dateTime`")


# ------------------------------------------------------------------ q3


def _q3_inputs(frames: Frames) -> tuple[Any, Any]:
    auctions = frames["auction"].where("category = 10").selectExpr("seller", "id AS auction", "dateTime AS atime")
    people = frames["person"].where("state IN ('OR', 'ID', 'CA')")
    return auctions, people.selectExpr("id AS seller", "name", "city", "state", "dateTime AS ptime")


_Q3 = ["name", "city", "state", "auction", "greatest(atime, ptime) AS latest"]


def _q3_dovetail(frames: Frames) -> Any:
    import dovetail as dt

    auctions, people = _q3_inputs(frames)
    flow = dt.multi_join({"a": auctions, "p": people}, on="seller")
    return flow.transform(lambda rows: rows.selectExpr(*_Q3))


def _q3_spark(frames: Frames) -> Any:
    auctions, people = _q3_inputs(frames)
    return auctions.join(people, "seller").selectExpr(*_Q3)


# ------------------------------------------------------------------ q8


def _q8_inputs(frames: Frames) -> tuple[Any, Any]:
    window = f"dateTime - dateTime % {WINDOW_MS} AS wstart"
    people = frames["person"].selectExpr("id", "name", window, "timestamp_millis(dateTime) AS pt", "dateTime AS ptime")
    auctions = frames["auction"].selectExpr(
        "seller AS id", "reserve", window, "timestamp_millis(dateTime) AS at", "dateTime AS atime"
    )
    return people, auctions


_Q8 = ["id", "name", "reserve", "wstart", "greatest(atime, ptime) AS latest"]


def _q8_dovetail(frames: Frames) -> Any:
    import dovetail as dt

    people, auctions = _q8_inputs(frames)
    flow = dt.multi_join(
        {"p": people, "a": auctions}, on=["id", "wstart"], window="10 seconds", time={"p": "pt", "a": "at"}
    )
    return flow.transform(lambda rows: rows.selectExpr(*_Q8))


def _q8_spark(frames: Frames) -> Any:
    from pyspark.sql import functions as F

    people, auctions = (frame for frame in _q8_inputs(frames))
    people, auctions = people.withWatermark("pt", "10 seconds"), auctions.withWatermark("at", "10 seconds")
    auctions = auctions.withColumnsRenamed({"id": "seller", "wstart": "awstart"})
    near = F.expr(
        "id = seller AND wstart = awstart AND at BETWEEN pt - INTERVAL 10 SECONDS AND pt + INTERVAL 10 SECONDS"
    )
    return people.join(auctions, near).selectExpr(*_Q8)


# ------------------------------------------------------------------ q13


def _keyed(frames: Frames, key: str) -> Any:
    return frames["bid"].selectExpr("auction", "bidder", "price", "dateTime AS latest", f"{key} AS key")


_Q13 = ["auction", "bidder", "price", "latest", "value"]


def _side(name: str, title: str, key: str) -> Query:
    def dovetail(frames: Frames, relation: Any) -> Any:
        import dovetail as dt

        return dt.enrich(_keyed(frames, key), relation, on="key", how="inner").select(*_Q13)

    def spark(frames: Frames, side: Any) -> Any:
        return _keyed(frames, key).join(side, "key").select(*_Q13)

    bids = f"(SELECT auction, bidder, price, dateTime, {key} AS k FROM bid)"
    select = "SELECT b.auction, b.bidder, b.price, b.dateTime AS latest, s.`value`"
    return Query(
        name,
        title,
        ("bid",),
        "auction BIGINT, bidder BIGINT, price BIGINT, latest BIGINT, `value` STRING",
        f"{select} FROM {bids} b JOIN side s ON b.k = s.key".replace("`value`", "value"),
        dovetail,
        spark,
        side=key,
        # A join with the version valid at the time of the bid: Flink then keeps no bids, which a plain join would.
        flink_sql=f"{select} FROM (SELECT auction, bidder, price, dateTime, rt, {key} AS k FROM bid) b "
        "JOIN side FOR SYSTEM_TIME AS OF b.rt AS s ON b.k = s.key",
    )


# ------------------------------------------------------------------ q20


def _q20_inputs(frames: Frames) -> tuple[Any, Any]:
    bids = frames["bid"].selectExpr("auction", "bidder", "price", "dateTime AS btime", "extra")
    auctions = frames["auction"].where("category = 10")
    names = ["itemName", "description", "initialBid", "reserve", "dateTime AS atime", "expires", "seller", "category"]
    return bids, auctions.selectExpr("id AS auction", *names, "extra AS aextra")


_Q20_NAMES = (
    "auction bidder price btime extra itemName description initialBid reserve atime expires seller category aextra"
)
_Q20 = [*_Q20_NAMES.split(), "greatest(atime, btime) AS latest"]


def _q20_dovetail(frames: Frames) -> Any:
    import dovetail as dt

    bids, auctions = _q20_inputs(frames)
    return dt.multi_join({"b": bids, "a": auctions}, on="auction").transform(lambda rows: rows.selectExpr(*_Q20))


def _q20_spark(frames: Frames) -> Any:
    bids, auctions = _q20_inputs(frames)
    return bids.join(auctions, "auction").selectExpr(*_Q20)


# ------------------------------------------------------------------ q4, q6: the join below their aggregates


def _q4_inputs(frames: Frames) -> tuple[Any, Any]:
    bids = frames["bid"].selectExpr("auction", "price", "dateTime AS btime")
    return bids, frames["auction"].selectExpr("id AS auction", "category", "seller", "dateTime AS atime", "expires")


_Q4 = ["auction", "category", "seller", "price", "btime AS latest"]
_Q4_CONDITION = "b.btime BETWEEN a.atime AND a.expires"


def _q4_dovetail(frames: Frames) -> Any:
    import dovetail as dt

    bids, auctions = _q4_inputs(frames)
    flow = dt.multi_join({"b": bids, "a": auctions}, on="auction", condition=_Q4_CONDITION)
    return flow.transform(lambda rows: rows.selectExpr(*_Q4))


def _q4_spark(frames: Frames) -> Any:
    bids, auctions = _q4_inputs(frames)
    joined = bids.join(
        auctions.withColumnRenamed("auction", "id"), _expr("auction = id AND btime BETWEEN atime AND expires")
    )
    return joined.selectExpr(*_Q4)


def _expr(text: str) -> Any:
    from pyspark.sql import functions as F

    return F.expr(text)


def queries(large_rows: int) -> dict[str, Query]:
    """All queries, by name; `large_rows` of the side input of q13-large."""
    every = [
        Query(
            "q3",
            "who sells in three states: auction and person",
            ("person", "auction"),
            "name STRING, city STRING, state STRING, auction BIGINT, latest BIGINT",
            "SELECT p.name, p.city, p.state, a.id AS auction, greatest(a.dateTime, p.dateTime) AS latest "
            "FROM auction a JOIN person p ON a.seller = p.id "
            "WHERE a.category = 10 AND p.state IN ('OR', 'ID', 'CA')",
            _q3_dovetail,
            _q3_spark,
        ),
        Query(
            "q8",
            "new users who sell within their window of 10 seconds: person and auction",
            ("person", "auction"),
            "id BIGINT, name STRING, reserve BIGINT, wstart BIGINT, latest BIGINT",
            # Flink's interval join lost rows here: its file source hands files out in any order, so that rows are late.
            # A plain join of the windows' starts is exact; it keeps every row for ever.
            "SELECT p.id, p.name, a.reserve, p.dateTime - mod(p.dateTime, 10000) AS wstart, "
            "greatest(a.dateTime, p.dateTime) AS latest FROM person p JOIN auction a ON p.id = a.seller "
            "AND p.dateTime - mod(p.dateTime, 10000) = a.dateTime - mod(a.dateTime, 10000)",
            _q8_dovetail,
            _q8_spark,
        ),
        _side("q13", "bid with a side input of 10,000 rows", "mod(auction, 10000)"),
        _side("q13-large", f"bid with a side input of {large_rows:,} rows", LARGE_KEY.format(rows=large_rows)),
        Query(
            "q20",
            "bid with its auction, of one category",
            ("bid", "auction"),
            "auction BIGINT, bidder BIGINT, price BIGINT, btime BIGINT, extra STRING, itemName STRING, "
            "description STRING, initialBid BIGINT, reserve BIGINT, atime BIGINT, expires BIGINT, seller BIGINT, "
            "category BIGINT, aextra STRING, latest BIGINT",
            "SELECT b.auction, b.bidder, b.price, b.dateTime AS btime, b.extra, a.itemName, a.description, "
            "a.initialBid, a.reserve, a.dateTime AS atime, a.expires, a.seller, a.category, a.extra AS aextra, "
            "greatest(a.dateTime, b.dateTime) AS latest "
            "FROM bid b JOIN auction a ON b.auction = a.id WHERE a.category = 10",
            _q20_dovetail,
            _q20_spark,
        ),
        Query(
            "q4-join",
            "bid with its auction while that is open: the join below q4 and q6",
            ("bid", "auction"),
            "auction BIGINT, category BIGINT, seller BIGINT, price BIGINT, latest BIGINT",
            "SELECT b.auction, a.category, a.seller, b.price, b.dateTime AS latest "
            "FROM bid b JOIN auction a ON b.auction = a.id AND b.dateTime BETWEEN a.dateTime AND a.expires",
            _q4_dovetail,
            _q4_spark,
        ),
    ]
    return {query.name: query for query in every}
