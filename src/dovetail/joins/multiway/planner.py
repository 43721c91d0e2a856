"""Plans multi-way joins: one MJoin, or a tree of them, by expected work per arrival.

All children of a node share one join attribute, so a node needs one shuffle. A node stores the results of its children,
which costs memory and insertions, but saves recomputing them for every arrival of another input. The expected work
decides: an arrival at a node costs one insertion, plus one probe per partial result for every input of the probing
sequence. The paper's own formulas (`dovetail.joins.multiway.paper_costs`) are printed for comparison.

Viglas, Naughton, Burger 2003, sections 2.2, 2.3 and appendix A.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations, islice
from typing import Any

from dovetail.core.errors import PlanError
from dovetail.joins.multiway.cascade import JoinTypes, MultiJoinType, cascade_tree, resolved_join_type
from dovetail.joins.multiway.graph import JoinGraph
from dovetail.joins.multiway.paper_costs import MultiwayCosts, discard_cost, paper_output_rate, split_cost

__all__ = [
    "ForcedPlan",
    "MultiwayCosts",
    "MultiwayPlan",
    "MultiwayStatistics",
    "PlanNode",
    "discard_cost",
    "paper_output_rate",
    "plan_multiway",
    "split_cost",
]

ForcedPlan = str | Sequence[Any]
_MOST_INPUTS_SEARCHED = 7
_DEFAULT_DISTINCT = 1000.0
_MOST_SPLITS_SHOWN = 8
_LEAST_GAIN = 0.1  # the share of work that a further node must save to be worth its shuffle


@dataclass(frozen=True)
class MultiwayStatistics:
    """Statistics of the inputs."""

    # Tuples per second per input; default: the mean of the others, or 1000.
    rates: Mapping[str, float] = field(default_factory=dict)
    # Number of values per join attribute; two tuples agree with probability 1/n.
    distinct: Mapping[str, float] = field(default_factory=dict)
    horizon_s: float = 60.0  # how long a tuple is kept: the window, or the time to plan for

    def __post_init__(self) -> None:
        for name, value in (*self.rates.items(), *self.distinct.items(), ("horizon_s", self.horizon_s)):
            if not (math.isfinite(value) and value > 0):
                raise PlanError(f"{name}={value}: rates, numbers of values and the horizon must be positive.")

    @property
    def is_measured(self) -> bool:
        """Whether rates or distinct values are known, not only the horizon."""
        return bool(self.rates or self.distinct)

    def rate(self, name: str) -> float:
        """Tuples per second of an input."""
        mean = sum(self.rates.values()) / len(self.rates) if self.rates else 1000.0
        return self.rates.get(name, mean)

    def selectivity(self, attribute: str) -> float:
        """The probability that two tuples agree in an attribute."""
        return 1.0 / self.distinct.get(attribute, _DEFAULT_DISTINCT)


def _rate_text(rate: float) -> str:
    """A rate in three digits and words: 3.89e10 says little to most."""
    for size, unit in ((1e12, " trillion"), (1e9, " billion"), (1e6, " million")):
        if rate >= size:
            return f"{rate / size:,.3g}{unit}"
    return f"{rate:,.3g}" if rate < 1_000 else f"{rate:,.0f}"


@dataclass(frozen=True)
class PlanNode:
    """A join of children, each the name of an input or another node."""

    children: tuple["str | PlanNode", ...]

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """All inputs below, in order."""
        return tuple(name for child in self.children for name in leaves_of(child))

    def nodes(self) -> Iterator["PlanNode"]:
        """This node and all nodes below it, children before parents."""
        for child in self.children:
            if isinstance(child, PlanNode):
                yield from child.nodes()
        yield self

    def as_nested(self) -> list[Any]:
        """The tree as nested lists of names, as `plan_multiway` takes it."""
        return [child.as_nested() if isinstance(child, PlanNode) else child for child in self.children]


def leaves_of(child: "str | PlanNode") -> tuple[str, ...]:
    """The inputs of a child of a node."""
    return (child,) if isinstance(child, str) else child.inputs


class _Estimator:
    """Memoized rates, state sizes and work of trees."""

    def __init__(self, graph: JoinGraph, statistics: MultiwayStatistics, costs: MultiwayCosts) -> None:
        self.graph = graph
        self.statistics = statistics
        self.costs = costs
        self._rates: dict[PlanNode, float] = {}
        self._sizes: dict[PlanNode, float] = {}
        self._works: dict[PlanNode, float] = {}

    def rate(self, child: str | PlanNode) -> float:
        """Tuples per second emitted by an input or a node."""
        if isinstance(child, str):
            return self.statistics.rate(child)
        if child not in self._rates:
            self._rates[child] = sum(self.rate(c) * math.prod(self._fanouts(child, c)) for c in child.children)
        return self._rates[child]

    def size(self, child: str | PlanNode) -> float:
        """Tuples kept of an input or a node; for a node, all combinations of what its children keep."""
        if isinstance(child, str):
            return self.statistics.rate(child) * self.statistics.horizon_s
        if child not in self._sizes:
            first = child.children[0]
            self._sizes[child] = self.size(first) * math.prod(self._fanouts(child, first))
        return self._sizes[child]

    def _fanouts(self, node: PlanNode, arriving: str | PlanNode) -> list[float]:
        """Matches per partial result in each other child, in probing order: fewest first."""
        others = [child for child in node.children if child is not arriving]
        found, bound = [], list(leaves_of(arriving))
        while others:
            linked = [c for c in others if self.graph.shared(bound, leaves_of(c))] or others
            best = min(linked, key=lambda c: self._matches(bound, c))
            found.append(self._matches(bound, best))
            bound += leaves_of(best)
            others.remove(best)
        return found

    def _matches(self, bound: Sequence[str], child: str | PlanNode) -> float:
        shared = self.graph.shared(bound, leaves_of(child))
        agreeing = math.prod(self.statistics.selectivity(attribute.name) for attribute in shared)
        return self.size(child) * agreeing

    def node_work(self, node: PlanNode) -> tuple[float, float]:
        """Probes and insertions per second of one node."""
        probes = inserts = 0.0
        for child in node.children:
            rate, partial = self.rate(child), 1.0
            inserts += rate
            for fanout in self._fanouts(node, child):
                probes += rate * partial
                partial *= fanout
            # The last extension makes the results; each is compared too.
            probes += rate * partial
        return probes, inserts

    def score(self, child: str | PlanNode) -> float:
        """Work, with a surcharge for every node after the first: each is another shuffle and operator."""
        nodes = 1 if isinstance(child, str) else len(list(child.nodes()))
        return self.work_s(child) * (1 + _LEAST_GAIN) ** (nodes - 1)

    def work_s(self, child: str | PlanNode) -> float:
        """Seconds of work per second of stream."""
        if isinstance(child, str):
            return 0.0
        return sum((self._own_work_s(node) for node in child.nodes()), 0.0)

    def _own_work_s(self, node: PlanNode) -> float:
        if node not in self._works:
            probes, inserts = self.node_work(node)
            self._works[node] = probes * self.costs.compare_s + inserts * self.costs.insert_s
        return self._works[node]


@dataclass(frozen=True)
class MultiwayPlan:
    """A tree of MJoins, the reason for it, and its expected performance.

    Examples
    --------
    >>> graph = JoinGraph.of({"a": ["x"], "b": ["x", "y"], "c": ["y"]}, on=[("a.x", "b.x"), ("b.y", "c.y")])
    >>> plan = plan_multiway(graph, MultiwayStatistics({"a": 1000.0, "b": 100.0, "c": 10.0}))
    >>> plan.root.as_nested()
    ['a', ['b', 'c']]
    >>> plan.as_dict()["tree"]["attribute"]
    'x'
    """

    graph: JoinGraph
    statistics: MultiwayStatistics
    costs: MultiwayCosts
    root: PlanNode
    reason: str
    alternatives: Mapping[str, tuple[Any, float]] = field(default_factory=dict)

    @cached_property
    def _estimator(self) -> _Estimator:
        return _Estimator(self.graph, self.statistics, self.costs)

    @property
    def work_s(self) -> float:
        """Expected seconds of work per second of stream."""
        return self._estimator.work_s(self.root)

    @property
    def output_rate(self) -> float:
        """Expected results per second."""
        return self._estimator.rate(self.root)

    @property
    def shuffles(self) -> int:
        """The number of shuffles: one per node."""
        return len(list(self.root.nodes()))

    def attribute_of(self, node: PlanNode) -> str:
        """The join attributes that all children of a node share, by which they are shuffled."""
        common = common_attributes(self.graph, node)
        return " and ".join(common) if common else "none common: random flushing, no shuffle"

    def as_dict(self) -> dict[str, Any]:
        """The plan as JSON-able data."""
        return {
            "graph": self.graph.as_dict(),
            "tree": self._describe(self.root),
            "plan": self.root.as_nested(),
            "reason": self.reason,
            "shuffles": self.shuffles,
            "work_s_per_s": self.work_s,
            "output_rate": self.output_rate,
            "alternatives": {n: {"plan": tree, "work_s_per_s": work} for n, (tree, work) in self.alternatives.items()},
            "paper": self._paper(),
        }

    def text(self) -> str:
        """The plan as lines for a terminal or a log."""
        lines = [f"{'plan':<13} {self.shuffles} MJoin(s), one shuffle each", *self._tree_lines(self.root, 1)]
        lines.append(f"{'reason':<13} {self.reason}")
        lines.append(
            f"{'predicted':<13} {_rate_text(self.output_rate)} results/s, {self.work_s:.3g} s of work per second"
        )
        for name, (tree, work) in self.alternatives.items():
            lines.append(f"{'instead':<13} {name} {tree}: {work:.3g} s of work per second")
        paper = self._paper()
        lines.append(f"{'paper':<13} output rate {paper['output_rate']:.3g}/s (numerator corrected)")
        for split in paper["splits"]:
            lines.append(
                f"{'':<13} split {split['left']} | {split['right']}: S = {split['S']:.3g} s, D = {split['D']:.3g} s "
                f"(the paper would {'split' if split['D'] > split['S'] else 'not split'})"
            )
        return "\n".join(lines)

    def _describe(self, child: str | PlanNode) -> dict[str, Any]:
        rate = self._estimator.rate(child)
        if isinstance(child, str):
            return {"input": child, "rate": rate}
        probes, inserts = self._estimator.node_work(child)
        return {
            "attribute": self.attribute_of(child),
            "children": [self._describe(c) for c in child.children],
            "rate": rate,
            "probes_per_s": probes,
            "inserts_per_s": inserts,
        }

    def _tree_lines(self, child: str | PlanNode, depth: int) -> list[str]:
        rate = f"{self._estimator.rate(child):,.3g} tuples/s"
        if isinstance(child, str):
            return [f"{'  ' * depth}{child}: {rate}"]
        probes, inserts = self._estimator.node_work(child)
        work = f"{probes:,.3g} probes/s, {inserts:,.3g} inserts/s"
        head = f"{'  ' * depth}MJoin on {self.attribute_of(child)}: {rate}, {work}"
        return [head, *(line for c in child.children for line in self._tree_lines(c, depth + 1))]

    def _paper(self) -> dict[str, Any]:
        rates = [self.statistics.rate(name) for name in self.graph.inputs]
        selectivities = _predicates(self.graph, self.graph.inputs, self.statistics)
        splits = []
        for left in islice(_halves(self.graph), _MOST_SPLITS_SHOWN):
            right = tuple(name for name in self.graph.inputs if name not in left)
            sides = [
                (
                    [self.statistics.rate(n) * self.statistics.horizon_s for n in side],
                    _predicates(self.graph, side, self.statistics),
                )
                for side in (left, right)
            ]
            splits.append(
                {
                    "left": list(left),
                    "right": list(right),
                    "S": split_cost(*sides[0], *sides[1], self.costs),
                    "D": discard_cost(*sides[0], *sides[1], self.costs),
                }
            )
        rate = paper_output_rate(rates, selectivities, self.statistics.horizon_s, self.costs)
        return {"output_rate": rate, "splits": splits}


def _predicates(graph: JoinGraph, names: Sequence[str], statistics: MultiwayStatistics) -> list[float]:
    """The selectivities of the join predicates among some inputs: n - 1 for an attribute of n inputs."""
    return [
        statistics.selectivity(attribute.name)
        for attribute in graph.restricted(names).attributes
        for _ in attribute.inputs[1:]
    ]


def _halves(graph: JoinGraph) -> Iterator[tuple[str, ...]]:
    """Splits into two connected sides, each once, the most uneven first."""
    names: tuple[str, ...] = graph.inputs
    for size in range(1, len(names) // 2 + 1):
        for left in combinations(names, size):
            right = tuple(name for name in names if name not in left)
            # Of two halves of the same size, only the one with the first input is listed.
            is_new = size < len(right) or names[0] in left
            if len(names) > 2 and is_new and _connected(graph, left) and _connected(graph, right):
                yield left


# ---------------------------------------------------------------- search


def common_attributes(graph: JoinGraph, node: PlanNode) -> list[str]:
    """The attributes that every child of a node has."""
    return [
        attribute.name
        for attribute in graph.attributes
        if all(set(leaves_of(child)) & set(attribute.columns) for child in node.children)
    ]


def plan_multiway(
    graph: JoinGraph,
    statistics: MultiwayStatistics | None = None,
    force: ForcedPlan = "auto",
    how: JoinTypes = "inner",
) -> MultiwayPlan:
    """Choose a tree of MJoins.

    Inputs that share one join key form one MJoin, unless `statistics` has rates or distinct values for which a tree is
    less work.

    Parameters
    ----------
    force
        ``"auto"``; ``"single"`` for one MJoin of all inputs; ``"binary"`` for the best tree of two-way joins; or a tree
        as nested lists of names, such as ``[["a", "b"], "c"]``.
    how
        The join type: all but ``"inner"`` need one MJoin; or a type per input, which are joined in their order.
    """
    kind, cascade = resolved_join_type(graph.inputs, how)
    statistics, costs = statistics or MultiwayStatistics(), MultiwayCosts()
    estimator = _Estimator(graph, statistics, costs)
    if cascade and force == "auto":
        root = _forced_tree(graph, cascade_tree(graph, cascade))
        return MultiwayPlan(graph, statistics, costs, root, "Outer joins are joined in the order of the inputs.")
    if force not in ("auto", "single", "binary"):
        return MultiwayPlan(graph, statistics, costs, _forced_tree(graph, force), "The plan was given.")
    candidates: dict[str, PlanNode] = {}
    if graph.star is not None or force == "single":
        candidates["single"] = PlanNode(graph.inputs)
    candidates["binary"] = _best_tree(estimator, graph.inputs, binary=True)
    chosen, reason = candidates.get(force), f"force={force!r}."
    if force == "auto":
        chosen, reason = _automatic(estimator, candidates, kind)
    assert chosen is not None
    others = {
        name: (tree.as_nested(), estimator.work_s(tree))
        for name, tree in candidates.items()
        if tree.as_nested() != chosen.as_nested()
    }
    return MultiwayPlan(graph, statistics, costs, chosen, reason, others)


def _automatic(estimator: _Estimator, candidates: Mapping[str, PlanNode], how: MultiJoinType) -> tuple[PlanNode, str]:
    """The plan for ``"auto"``, and the reason for it."""
    graph, single = estimator.graph, candidates.get("single")
    if single is not None and len(graph.attributes) == 1 and not estimator.statistics.is_measured:
        return single, "One join key, and no statistics of rates or values by which a tree would be less work."
    if single is not None and how != "inner":
        return single, f"how={how!r} takes one MJoin of all inputs."
    best = _best_tree(estimator, graph.inputs, binary=False)
    if single is not None and len(graph.inputs) > _MOST_INPUTS_SEARCHED:
        # The greedy tree is binary; with one key, any of its nodes can be merged.
        best = min(_merged(estimator, best), single, key=estimator.score)
    reason = "The least expected work per arrival of all trees whose nodes each have one join attribute; "
    return best, reason + f"a further node must save {_LEAST_GAIN:.0%}.".replace("%", " %")


def _best_tree(estimator: _Estimator, names: Sequence[str], binary: bool) -> PlanNode:
    """The tree of least work: by dynamic programming over sets of inputs, or greedily if there are too many."""
    best: dict[frozenset[str], str | PlanNode] = {frozenset([name]): name for name in names}
    graph = estimator.graph
    if len(names) > _MOST_INPUTS_SEARCHED:
        return _greedy_tree(estimator, names)
    for size in range(2, len(names) + 1):
        for chosen in combinations(names, size):
            if not _connected(graph, chosen):
                continue
            options = []
            for blocks in _partitions(list(chosen), 2 if binary else size):
                if all(frozenset(block) in best for block in blocks):
                    node = PlanNode(tuple(best[frozenset(block)] for block in blocks))
                    if common_attributes(graph, node):
                        options.append(node)
            if options:
                best[frozenset(chosen)] = min(options, key=estimator.score)
    root = best.get(frozenset(names))
    if not isinstance(root, PlanNode):
        raise PlanError("No tree of joins covers all inputs.", hint="Check that the join graph is connected.")
    return root


def _greedy_tree(estimator: _Estimator, names: Sequence[str]) -> PlanNode:
    """Repeatedly join the two parts with the fewest results."""
    parts: list[str | PlanNode] = list(names)
    while len(parts) > 1:
        pairs = [
            PlanNode(pair)
            for pair in combinations(parts, 2)
            if estimator.graph.shared(leaves_of(pair[0]), leaves_of(pair[1]))
        ]
        best = min(pairs, key=lambda node: (estimator.rate(node), estimator.work_s(node)))
        parts = [part for part in parts if part not in best.children] + [best]
    root = parts[0]
    assert isinstance(root, PlanNode)
    return root


def _merged(estimator: _Estimator, root: PlanNode) -> PlanNode:
    """Merge nodes into their parents, one at a time, while that saves work."""
    while True:
        best = min(_with_one_merged(root), key=estimator.score, default=root)
        if estimator.score(best) >= estimator.score(root):
            return root
        root = best


def _with_one_merged(node: PlanNode) -> Iterator[PlanNode]:
    """The trees in which the children of one node become children of its parent."""
    for place, child in enumerate(node.children):
        if isinstance(child, PlanNode):
            before, after = node.children[:place], node.children[place + 1 :]
            yield PlanNode((*before, *child.children, *after))
            for changed in _with_one_merged(child):
                yield PlanNode((*before, changed, *after))


def _partitions(names: list[str], most_blocks: int) -> Iterator[list[list[str]]]:
    """All ways to divide names into 2 to `most_blocks` blocks."""

    def divide(rest: list[str]) -> Iterator[list[list[str]]]:
        if not rest:
            yield []
            return
        for smaller in divide(rest[1:]):
            for place, block in enumerate(smaller):
                yield [*smaller[:place], [rest[0], *block], *smaller[place + 1 :]]
            if len(smaller) < most_blocks:
                yield [[rest[0]], *smaller]

    for blocks in divide(names):
        if len(blocks) >= 2:
            yield blocks


def _connected(graph: JoinGraph, names: Sequence[str]) -> bool:
    return len(names) == 1 or graph.restricted(names).is_connected()


def _forced_tree(graph: JoinGraph, force: ForcedPlan) -> PlanNode:
    if isinstance(force, str):
        raise PlanError(f"plan={force!r} is none of auto, single, binary.", hint='Or give a tree: [["a", "b"], "c"].')

    def read(part: Any) -> str | PlanNode:
        if isinstance(part, str):
            return part
        if not isinstance(part, list | tuple) or len(part) < 2:
            raise PlanError(f"plan={force!r}: each join has at least two parts, and {part!r} has not.")
        return PlanNode(tuple(read(inner) for inner in part))

    root = read(list(force))
    assert isinstance(root, PlanNode)
    if sorted(root.inputs) != sorted(graph.inputs):
        raise PlanError(f"plan={force!r} does not name each of {', '.join(graph.inputs)} once.")
    for node in root.nodes():
        if not common_attributes(graph, node) and node is not root:
            raise PlanError(f"plan={node.as_nested()!r}: its parts have no join attribute in common.")
        if not _connected(graph, node.inputs):
            raise PlanError(f"plan={node.as_nested()!r}: no equality links its parts.")
    return root
