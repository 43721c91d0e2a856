"""What a notebook shows, run by nbclient in a kernel of its own: plan, progress, a small table, the page's address."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

CELLS = [
    """
import pyarrow as pa, dovetail as dt
from dovetail.testing.flows import Feed
from dovetail.testing.sessions import SHORT_LIVED, local_session
spark = local_session(settings=SHORT_LIVED)
rows = pa.table({"customer_id": [1, 2], "name": ["<Ada>", "Grace"]})
customers = dt.Relation.build(rows, "customers", on="customer_id")
customers.head()
""",
    """
Feed("landing").add(pa.table({"customer_id": [1, 2, 3]}))
import os
orders = spark.readStream.schema("customer_id long").parquet(os.path.abspath("landing"))
flow = dt.stream(orders, "orders").enrich(customers, on="customer_id", how="left", budget="4MB")
flow
""",
    "dt.explain(flow)",
    """
query = flow.write(dt.sinks.parquet("warehouse"), checkpoint="checkpoint", trigger="available-now")
query.awaitTermination()
query
""",
    """
page = dt.serve(query, port=0)
page
""",
    "page.close(); spark.stop()",
]


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """The last output of each cell, by MIME type."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell.strip()) for cell in CELLS])
    place: Path = tmp_path_factory.mktemp("notebook")
    client = NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(place)}})
    try:
        client.execute()
    except CellExecutionError as error:
        pytest.fail(str(error))
    results = [[out for out in cell.outputs if out.output_type == "execute_result"] for cell in notebook.cells]
    return [dict(found[-1]["data"]) if found else {} for found in results]


def test_relation_shows_rows(shown: list[dict[str, str]]) -> None:
    assert "Grace" in shown[0]["text/plain"]


def test_flow_shows_its_stages_and_columns(shown: list[dict[str, str]]) -> None:
    assert "source -&gt; 1-enrich; columns customer_id, name" in shown[1]["text/html"]
    assert shown[1]["text/plain"].startswith("Flow('orders': source -> 1-enrich")


def test_explanation_is_the_plan(shown: list[dict[str, str]]) -> None:
    assert "1-enrich" in shown[2]["text/html"]


def test_query_is_a_table_of_its_operators(shown: list[dict[str, str]]) -> None:
    assert "<th>operator</th>" in shown[3]["text/html"]
    assert "<td>1-enrich</td>" in shown[3]["text/html"]
    assert "ended" in shown[3]["text/plain"]


def test_page_is_a_link(shown: list[dict[str, str]]) -> None:
    assert 'href="http://127.0.0.1:' in shown[4]["text/html"]
