"""docs/watching.md and the dashboard name every metric that there is, and no other."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

import dovetail as dt
from dovetail.testing.checkpoints import WrittenFlow

DOCS = Path(__file__).parents[3] / "docs"
METRIC = re.compile(r"dovetail_[a-z_]+")


@pytest.fixture(scope="module")
def metrics(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The names of all metrics as Prometheus stores them, also of those that have no value yet."""
    flow = WrittenFlow(tmp_path_factory.mktemp("docs") / "checkpoint", "orders")
    flow.start()
    flow.run(2)
    families = text_string_to_metric_families(dt.metrics.text(flow))
    return {f"{one.name}_total" if one.type == "counter" else one.name for one in families}


def test_page_lists_every_metric(metrics: set[str]) -> None:
    text = (DOCS / "watching.md").read_text()
    listed = set(METRIC.findall(text[text.index("## Metrics") : text.index("## Logs")]))
    assert listed == metrics


def test_dashboard_asks_for_metrics_that_exist(metrics: set[str]) -> None:
    dashboard = json.loads((DOCS / "grafana" / "dovetail.json").read_text())
    asked: list[str] = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert len(dashboard["panels"]) == len({panel["id"] for panel in dashboard["panels"]}) == 10
    assert {name for text in asked for name in METRIC.findall(text)} <= metrics


def test_python_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a written flow in the place of one that Spark runs."""
    first, logs = re.findall(r"```python\n(.*?)```", (DOCS / "watching.md").read_text(), re.DOTALL)
    written = WrittenFlow(tmp_path / "checkpoint", "orders")

    class Described:
        def write(self, sink: Any, **options: Any) -> WrittenFlow:
            assert set(options) == {"checkpoint", "trigger"}
            return written

    names: dict[str, Any] = {"dt": dt, "flow": Described(), "path": tmp_path / "out", "checkpoint": written.checkpoint}
    exec(first, names)
    try:
        assert names["page"].address.startswith("http://127.0.0.1:")
        assert names["endpoint"].address == "http://127.0.0.1:9464/metrics"
    finally:
        names["page"].close()
        names["endpoint"].close()
    compile(logs, "watching.md", "exec")
