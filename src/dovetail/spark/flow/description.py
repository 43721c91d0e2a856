"""A flow as a picture: what it reads, its stages, its relations and sinks, as nodes and edges for people to look at."""

from collections.abc import Sequence
from typing import Any

from dovetail.spark.flow.sink import Sink
from dovetail.spark.flow.stages import Diversion, Stage
from dovetail.spark.flow.step import Step

__all__ = ["describe_flow"]

_HIDDEN = ("name", "kind", "hash", "input", "output")


def describe_flow(stages: Sequence[Stage], sink: Sink, sources: Sequence[str]) -> dict[str, Any]:
    """Nodes and edges, JSON-serializable: settings, paths and names, but no values of rows.

    Every node has ``id``, ``kind`` (``source``, ``step``, ``transform``, ``divert``, ``relation``, ``sink``, ``side``),
    ``title``, ``detail`` and ``facts``; the id of a step is the operator's name. An edge is a pair of ids.
    """
    return _Picture(stages, sink, sources).as_dict()


class _Picture:
    def __init__(self, stages: Sequence[Stage], sink: Sink, sources: Sequence[str]) -> None:
        self._nodes: list[dict[str, Any]] = []
        self._edges: list[list[str]] = []
        first = next((stage for stage in stages if isinstance(stage, Step)), None)
        names = list(sources) or _inputs_of(first) or ["source"]
        before = [self._node(f"source:{name}", "source", name) for name in names]
        self._sides = 0
        for number, stage in enumerate(stages):
            before = [self._stage(number, stage, before)]
        end = self._node("sink", "sink", sink.kind, _target_of(sink))
        self._edges += [[node, end] for node in before]

    def as_dict(self) -> dict[str, Any]:
        return {"nodes": self._nodes, "edges": self._edges}

    def _node(self, identity: str, kind: str, title: str, detail: str = "", facts: dict[str, Any] | None = None) -> str:
        if not any(node["id"] == identity for node in self._nodes):
            self._nodes.append(
                {"id": identity, "kind": kind, "title": title, "detail": detail, "facts": dict(facts or {})}
            )
        return identity

    def _stage(self, number: int, stage: Stage, before: list[str]) -> str:
        if isinstance(stage, Step):
            return self._step(stage, before)
        if isinstance(stage, Diversion):
            node = self._node(f"stage:{number}", "divert", "divert", "rows that leave")
            self._side(stage.sink, node)
        else:
            node = self._node(f"stage:{number}", "transform", "transform", f"{len(stage.output.names)} columns")
        self._edges += [[one, node] for one in before]
        return node

    def _step(self, step: Step, before: list[str]) -> str:
        about = step.fingerprint()
        facts = {name: value for name, value in about.items() if name not in _HIDDEN and value is not None}
        relation = facts.pop("relation", None)
        kind = str(about["kind"])
        node = self._node(step.name, "step", kind.partition(" ")[0], kind.partition(" ")[2], facts)
        taken = [other["id"] for other in self._nodes if other["id"] in (step.takes or ())]
        # A tree of joins: a step takes others and some of the sources, which the first of its joins already has.
        self._edges += [[one, node] for one in (taken or before)]
        if isinstance(relation, str):
            title = relation.rstrip("/").rpartition("/")[2] or relation
            self._edges.append([self._node(f"relation:{relation}", "relation", title, relation), node])
        if step.side_sink is not None:
            self._side(step.side_sink, node)
        return node

    def _side(self, sink: Sink, from_node: str) -> None:
        side = self._node(f"side:{self._sides}", "side", sink.kind, _target_of(sink))
        self._sides += 1
        self._edges.append([from_node, side])


def _inputs_of(step: Step | None) -> list[str]:
    """The names of the streams that a multi-way join takes, as its fingerprint has them."""
    about = {} if step is None else step.fingerprint()
    if about.get("kind") != "multi_join":
        return []
    return [str(entry).partition(":")[0] for entry in about["input"]]


def _target_of(sink: Sink) -> str:
    """Where a sink writes: a path, a table or a topic; nothing of its login."""
    return next((str(target) for name in ("path", "table", "topic") if (target := getattr(sink, name, None))), "")
