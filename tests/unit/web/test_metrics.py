"""Metrics in Prometheus' text format, read back by Prometheus' own parser."""

import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

import dovetail as dt
from dovetail.core.errors import PlanError
from dovetail.storage.running import running
from dovetail.testing.checkpoints import WrittenFlow


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found, "a series appears twice"
            found[key] = sample.value
    return found


@pytest.fixture
def flow(tmp_path: Path) -> WrittenFlow:
    written = WrittenFlow(tmp_path / "c", 'orders "of" the day')
    written.start()
    written.run(12)
    return written


def test_metrics_are_those_of_the_last_commit(flow: WrittenFlow) -> None:
    found = samples(dt.metrics.text(flow))
    label, operator = ("flow", flow.name), ("operator", "1-enrich")
    assert found["dovetail_flow_batch", (label,)] == 11
    assert found["dovetail_flow_running", (label,)] == 0
    assert found["dovetail_operator_tuples_in_total", (label, operator)] == flow._metrics.stream_tuples_in
    assert found["dovetail_operator_cache_hits_total", (label, operator)] == flow._metrics.cache_hits
    assert found["dovetail_operator_memory_bytes", (("component", "index"), label, operator)] == 9_500_000
    assert found["dovetail_operator_budget_bytes", (label, operator)] == 256_000_000
    with running(flow.checkpoint):
        assert samples(dt.metrics.text(flow))["dovetail_flow_running", (label,)] == 1


def test_endpoint_is_on_loopback_and_counts_on(flow: WrittenFlow) -> None:
    with dt.metrics.prometheus(flow.checkpoint, port=0) as endpoint:
        assert endpoint.address.startswith("http://127.0.0.1:")
        for batch in (11, 12):
            with urllib.request.urlopen(endpoint.address, timeout=20) as answer:
                assert answer.headers["content-type"].startswith("text/plain")
                text = answer.read().decode()
            assert samples(text)["dovetail_flow_batch", (("flow", flow.name),)] == batch
            flow.run(1)


def test_checkpoint_without_a_flow_has_metrics_too(tmp_path: Path) -> None:
    found = samples(dt.metrics.text(tmp_path / "nothing"))
    assert found == {("dovetail_flow_running", (("flow", "nothing"),)): 0.0}


def test_two_flows_of_one_name_are_two_series(flow: WrittenFlow, tmp_path: Path) -> None:
    other = WrittenFlow(tmp_path / "other", flow.name)
    other.start()
    other.run(3)
    batches = {key: value for key, value in samples(dt.metrics.text(flow, other)).items() if key[0].endswith("_batch")}
    assert sorted(batches.values()) == [2, 11]


def test_metrics_need_a_flow() -> None:
    with pytest.raises(PlanError, match="need a flow"):
        dt.metrics.prometheus()
