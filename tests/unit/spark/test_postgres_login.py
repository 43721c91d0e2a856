"""Addresses and options of TLS, as far as they can be judged without a server."""

import pytest

import dovetail as dt
from dovetail.core.errors import PlanError
from dovetail.spark.sinks.postgres_login import PostgresLogin, jdbc_options

LOGIN = {"database": "warehouse", "user": "etl"}


@pytest.mark.parametrize(
    ("address", "options"),
    [
        ("db/w", {"host": "db", "port": 5432, "database": "w"}),
        ("[::1]:5433/w", {"host": "::1", "port": 5433, "database": "w"}),
        ("db/w?ssl=true", {"host": "db", "port": 5432, "database": "w", "sslmode": "verify-full"}),
        ("db/w?ssl=true&sslmode=require", {"host": "db", "port": 5432, "database": "w", "sslmode": "require"}),
        (
            "db:1/w?user=a%40b&password=p%26q",
            {"host": "db", "port": 1, "database": "w", "user": "a@b", "password": "p&q"},
        ),
    ],
)
def test_address_is_read_as_the_jdbc_driver_does(address: str, options: dict[str, object]) -> None:
    assert jdbc_options(f"jdbc:postgresql://{address}") == options


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("jdbc:postgresql://db/w?password=secret&loginTimeout=3", "'loginTimeout'"),
        ("jdbc:mysql://db/w?password=secret", "'jdbc:mysql://db/w' is not an address"),
        ("jdbc:postgresql://etl:secret@db/w", "not an address"),
        ("jdbc:postgresql://db/w?user=etl&sslmode=secretly", "sslmode='secretly' is not known"),
        ("jdbc:postgresql://db/w?sslmode=require", "names no user"),
        ("jdbc:postgresql://db/w?user=etl&sslcert=/nowhere.pem", "sslcert='/nowhere.pem' is not a file"),
    ],
)
def test_address_that_cannot_be_used_is_refused_by_what_is_wrong(address: str, why: str) -> None:
    with pytest.raises(PlanError, match=why) as refused:
        dt.sinks.jdbc(address, "orders")
    assert "password=secret" not in str(refused.value)


def test_option_in_the_address_and_beside_it_is_refused() -> None:
    with pytest.raises(PlanError, match="user is given twice"):
        dt.sinks.jdbc("jdbc:postgresql://db/w?user=etl", "orders", user="other")


def test_password_is_in_no_text_of_a_sink() -> None:
    sink = dt.sinks.postgres("orders", **LOGIN, password="hush", sslmode="require")
    assert "hush" not in f"{sink!r} {sink} {sink._login!r}"


def test_login_shows_no_password() -> None:
    login = PostgresLogin("db", 5432, "warehouse", "etl", "secret", {"sslmode": "require"})
    assert repr(login) == "PostgresLogin(db:5432/warehouse)"
    assert login.options["password"] == "secret"
