"""Metrics of flows for Prometheus, read from their checkpoints; as ``dovetail.metrics``.

Counters are those since the flow began, across restarts. Labels are the flow's name, its operators and their
components; no value of a row is in any of them. Importing this module does not start anything.
"""

import os
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from dovetail.core.errors import PlanError
from dovetail.web.reading import FlowReader

__all__ = ["DEFAULT_PORT", "MetricsEndpoint", "prometheus", "text"]

DEFAULT_PORT = 9464

_COUNTERS = {
    "tuples_in": ("stream_tuples_in", "Stream tuples taken."),
    "rows_out": ("output_rows", "Rows emitted."),
    "tuples_matched": ("matched_tuples", "Tuples that left with a match."),
    "tuples_unmatched": ("unmatched_tuples", "Tuples that left without a match."),
    "cache_hits": ("cache_hits", "Tuples that the cache answered with rows."),
    "cache_negative_hits": ("negative_hits", "Tuples that the cache answered with: no match."),
    "cache_evictions": ("cache_evictions", "Values evicted from the cache."),
    "lookups": ("lookups", "Codes looked up in the relation."),
    "relation_bytes_read": ("bytes_read", "Bytes read from the relation."),
    "cpu_seconds": ("cpu_seconds", "CPU time of the join."),
    "disk_seconds": ("disk_seconds", "Time spent reading the relation."),
}


class _FlowCollector(Collector):
    """The metrics of flows at the moment when they are asked for."""

    def __init__(self, checkpoints: list[str]) -> None:
        self._readers = [FlowReader(checkpoint) for checkpoint in checkpoints]
        self._guard = threading.Lock()

    def collect(self) -> Iterator[Metric]:
        with self._guard:
            for reader in self._readers:
                reader.refresh()
            views = [reader.view() for reader in self._readers]
        names = [view["flow"] for view in views]
        # Two flows of one name would be one series.
        views = [
            {
                **view,
                "flow": f"{view['flow']} ({view['checkpoint']})" if names.count(view["flow"]) > 1 else view["flow"],
            }
            for view in views
        ]
        yield from _of_flows(views)
        yield from _of_operators(views)


def _of_flows(views: list[dict[str, Any]]) -> Iterator[Metric]:
    up = GaugeMetricFamily("dovetail_flow_running", "1 if a process runs the flow.", labels=["flow"])
    batch = GaugeMetricFamily("dovetail_flow_batch", "The last committed micro-batch.", labels=["flow"])
    began = GaugeMetricFamily(
        "dovetail_flow_batch_start_seconds", "When the last micro-batch began, since 1970.", labels=["flow"]
    )
    took = GaugeMetricFamily(
        "dovetail_flow_batch_duration_seconds", "How long the last micro-batch took.", labels=["flow"]
    )
    behind = GaugeMetricFamily(
        "dovetail_flow_records_behind", "Records that the most delayed Kafka partition is behind.", labels=["flow"]
    )
    for view in views:
        label = [view["flow"]]
        up.add_metric(label, float(view["running"] is not None))
        if view["batch"] is not None:
            batch.add_metric(label, view["batch"])
            began.add_metric(label, (view["time_ms"] or 0) / 1000)
        if view["batches"]:
            took.add_metric(label, view["batches"][0]["took_ms"] / 1000)
            if view["batches"][0]["behind"] is not None:
                behind.add_metric(label, view["batches"][0]["behind"])
    yield from (up, batch, began, took, behind)


def _of_operators(views: list[dict[str, Any]]) -> Iterator[Metric]:
    names = ["flow", "operator"]
    pending = GaugeMetricFamily("dovetail_operator_pending_tuples", "Tuples that wait.", labels=names)
    oldest = GaugeMetricFamily("dovetail_operator_oldest_wait_seconds", "The longest wait of these.", labels=names)
    budget = GaugeMetricFamily("dovetail_operator_budget_bytes", "Declared memory, all shards.", labels=names)
    memory = GaugeMetricFamily("dovetail_operator_memory_bytes", "Held memory.", labels=[*names, "component"])
    state = GaugeMetricFamily("dovetail_operator_state_bytes", "Durable state.", labels=names)
    version = GaugeMetricFamily("dovetail_operator_relation_version", "Version of the relation in use.", labels=names)
    shed = CounterMetricFamily("dovetail_operator_tuples_shed", "Dropped tuples.", labels=[*names, "policy"])
    counters = {
        field: CounterMetricFamily(f"dovetail_operator_{name}", about, labels=names)
        for name, (field, about) in _COUNTERS.items()
    }
    for view in views:
        for operator in view["operators"]:
            label = [view["flow"], operator["name"]]
            pending.add_metric(label, operator["pending"])
            oldest.add_metric(label, (operator["oldest_wait_ms"] or 0) / 1000)
            state.add_metric(label, operator["state_bytes"])
            if operator["budget_bytes"] is not None:
                budget.add_metric(label, operator["budget_bytes"])
            if operator["relation_version"] is not None:
                version.add_metric(label, operator["relation_version"])
            for component, size in operator["memory"].items():
                memory.add_metric([*label, component], size)
            for policy, tuples in operator["totals"]["shed"].items():
                shed.add_metric([*label, policy], tuples)
            for field, family in counters.items():
                family.add_metric(label, operator["totals"][field])
    yield from (pending, oldest, budget, memory, state, version, shed, *counters.values())


def text(*flows: Any) -> str:
    """The metrics of flows in Prometheus' text format, to be written to a file or sent somewhere.

    ``flows`` are running flows, as ``Flow.write`` returned them, or paths of checkpoints.
    """
    return generate_latest(_registry(flows)).decode()


class MetricsEndpoint:
    """An endpoint that Prometheus can scrape, at ``address``; as a context manager, until the end of the block."""

    def __init__(self, registry: CollectorRegistry, host: str, port: int) -> None:
        from starlette.applications import Starlette
        from starlette.requests import Request
        from starlette.responses import Response
        from starlette.routing import Route

        from dovetail.web.serving import ServedThread

        def metrics(request: Request) -> Response:
            return Response(generate_latest(registry), headers={"content-type": CONTENT_TYPE_LATEST})

        self._served = ServedThread(host, port, lambda _: Starlette(routes=[Route("/metrics", metrics)]))
        self.address = f"http://{host}:{self._served.port}/metrics"

    def close(self) -> None:
        """Stop serving. The flows run on."""
        self._served.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"MetricsEndpoint({self.address!r})"


def prometheus(*flows: Any, host: str = "127.0.0.1", port: int = DEFAULT_PORT) -> MetricsEndpoint:
    """Serve the metrics of flows for Prometheus, in this process; by default on loopback, at port 9464.

    Parameters
    ----------
    flows
        Running flows, as ``Flow.write`` returned them, or paths of checkpoints.
    host, port
        Where it listens; port 0 takes any free one. There is no token, and there are no values of rows.

    Examples
    --------
    >>> import tempfile
    >>> with prometheus(tempfile.mkdtemp(), port=0) as endpoint:
    ...     endpoint.address.endswith("/metrics")
    True
    """
    return MetricsEndpoint(_registry(flows), host, port)


def _registry(flows: tuple[Any, ...]) -> CollectorRegistry:
    if not flows:
        raise PlanError("Metrics need a flow.", hint="Pass what flow.write returned, or the path of a checkpoint.")
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_FlowCollector([os.fspath(getattr(flow, "checkpoint", flow)) for flow in flows]))
    return registry
