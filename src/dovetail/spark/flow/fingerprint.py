"""What ties a checkpoint to one flow: its operators, their inputs, and how rows are routed."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dovetail.core.errors import StateError
from dovetail.storage.documents import read_document

__all__ = ["FlowFingerprint", "saved_operators"]

_START_ANEW = (
    "Stop the old flow with drain=True, and start the changed one with a new checkpoint and resume_from= this one."
)


@dataclass(frozen=True)
class FlowFingerprint:
    """The part of a flow that its saved state depends on; JSON-serializable.

    Each stateful operator has ``name``, ``kind``, ``shards``, ``hash``, ``input`` (columns with types), ``output``, and
    whatever else its state depends on.

    >>> saved = FlowFingerprint("orders", ({"name": "1-enrich", "shards": 8},))
    >>> FlowFingerprint("orders", ({"name": "1-enrich", "shards": 4},)).require_same(saved, "ckpt")
    Traceback (most recent call last):
    dovetail.core.errors.StateError: The checkpoint ckpt was made with shards=8 in operator '1-enrich'; this flow has
    shards=4. Use shards=8 again, or stop the old flow with drain=True, and start the changed one with a new checkpoint
    and resume_from= this one.
    """

    flow: str
    operators: tuple[Mapping[str, Any], ...]

    def as_dict(self) -> dict[str, Any]:
        return {"flow": self.flow, "operators": [dict(operator) for operator in self.operators]}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> "FlowFingerprint":
        return cls(saved["flow"], tuple(saved["operators"]))

    def require_same(self, saved: "FlowFingerprint", where: object) -> None:
        """Refuse a checkpoint whose state this flow cannot use, and name the difference."""
        if saved.flow != self.flow:
            raise StateError(
                f"The checkpoint {where} belongs to the flow {saved.flow!r}, this flow is {self.flow!r}.",
                hint="Give every flow a checkpoint of its own, or this flow its old name.",
            )
        ours = [operator["name"] for operator in self.operators]
        theirs = [operator["name"] for operator in saved.operators]
        if ours != theirs:
            raise StateError(
                f"The checkpoint {where} was made with the operators {', '.join(theirs) or 'none'}; this flow has "
                f"{', '.join(ours) or 'none'}.",
                hint=_START_ANEW,
            )
        for our, their in zip(self.operators, saved.operators, strict=True):
            for name in sorted({*our, *their}):
                if our.get(name) != their.get(name):
                    raise _difference(where, our["name"], name, their.get(name), our.get(name))


def saved_operators(root: Path) -> tuple[Mapping[str, Any], ...]:
    """The operators of the flow whose state is in a directory; none if there is no flow yet."""
    saved = read_document(root / "flow.json")
    return () if saved is None else FlowFingerprint.from_dict(saved).operators


def _difference(where: object, operator: str, name: str, saved: Any, ours: Any) -> StateError:
    if isinstance(saved, list) and isinstance(ours, list):
        lost, new = [c for c in saved if c not in ours], [c for c in ours if c not in saved]
        detail = "; ".join(
            part
            for part in (
                f"then there was {', '.join(map(str, lost))}" if lost else "",
                f"now there is {', '.join(map(str, new))}" if new else "",
                "the order is another" if not lost and not new else "",
            )
            if part
        )
        return StateError(
            f"The checkpoint {where} was made with another {name} of operator {operator!r}: {detail}.", hint=_START_ANEW
        )
    hint = f"Use {name}={saved!r} again, or s{_START_ANEW[1:]}"
    return StateError(
        f"The checkpoint {where} was made with {name}={saved!r} in operator {operator!r}; this flow has "
        f"{name}={ours!r}.",
        hint=hint,
    )
