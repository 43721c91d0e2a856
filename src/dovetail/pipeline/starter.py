"""`dovetail init`: a starter pipeline with a little sample data."""

from pathlib import Path

from dovetail.core.errors import PlanError

__all__ = ["write_starter"]

_PIPELINE = """\
# A pipeline: orders arrive as files, are joined with customers, and are written to Parquet files.
# Check it:  dovetail check pipeline.yaml      Run it:  dovetail run pipeline.yaml
# Paths are relative to this file. ${NAME} and ${NAME:-default} are replaced by environment variables.

name: orders
checkpoint: checkpoint            # the flow resumes from here after a stop; one directory per flow
trigger: available-now            # process what is there, then stop; "5 seconds" to keep running

sources:
  orders:
    format: json                  # json, csv, parquet, xml, orc, kafka, rate or bursty
    path: landing
    schema: order_id bigint, customer_id bigint, amount double
    malformed: dead-letter        # rows that are not JSON of the schema; or: error, drop
    dead_letter: {path: dead-letters}

relations:
  customers:
    path: relations/customers     # built if it does not exist
    build:
      format: csv
      path: master/customers.csv
      options: {header: true}
      schema: customer_id bigint, name string, segment string
      on: customer_id
      shards: 2
      unique: true

steps:
  - where: amount > 0
  - enrich:
      relation: customers
      on: customer_id
      how: left
      budget: 16MB                # the maximum memory of the join, all shards together
  - with: {is_vip: "coalesce(segment = 'vip', false)"}

sink:
  format: parquet
  path: warehouse/orders
"""
_CUSTOMERS = "customer_id,name,segment\n1,Ada,vip\n2,Grace,regular\n3,Edsger,regular\n"
_ORDERS = """\
{"order_id": 100, "customer_id": 1, "amount": 12.5}
{"order_id": 101, "customer_id": 2, "amount": 3.0}
{"order_id": 102, "customer_id": 9, "amount": 7.25}
this line is not JSON, and ends up in dead-letters
{"order_id": 103, "customer_id": 3, "amount": 0}
"""
_FILES = {
    "pipeline.yaml": _PIPELINE,
    "master/customers.csv": _CUSTOMERS,
    "landing/orders-1.json": _ORDERS,
}


def write_starter(directory: Path) -> list[str]:
    """Write a starter project to a new or empty directory; return the names of the files."""
    if directory.is_dir() and any(directory.iterdir()):
        raise PlanError(f"{directory} is not empty.", hint="Name a new directory: dovetail init shop")
    try:
        for name, text in _FILES.items():
            file = directory / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise PlanError(f"{directory} cannot be written: {error.strerror}.") from None
    return list(_FILES)
