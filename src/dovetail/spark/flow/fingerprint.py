"""What makes a checkpoint the checkpoint of one flow: its operators, their inputs, and how rows are routed."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dovetail.errors import StateError

__all__ = ["FlowFingerprint"]

_START_ANEW = "Start the changed flow with a new checkpoint, after the old one was stopped with drain=True."


@dataclass(frozen=True)
class FlowFingerprint:
    """The part of a flow that its saved state depends on.

    Attributes
    ----------
    flow
        The flow's name.
    operators
        One entry per stateful operator, in order: ``name``, ``kind``, ``shards``, ``hash``, ``input`` (columns with
        types), ``output``, and what else its state depends on, all ready for JSON.

    Examples
    --------
    >>> saved = FlowFingerprint("orders", ({"name": "1-enrich", "shards": 8},))
    >>> FlowFingerprint("orders", ({"name": "1-enrich", "shards": 4},)).require_same(saved, "ckpt")
    Traceback (most recent call last):
    dovetail.errors.StateError: The checkpoint ckpt was made with shards=8 in operator '1-enrich'; this flow has \
shards=4. Use shards=8 again, or start the changed flow with a new checkpoint, after the old one was stopped with \
drain=True.
    """

    flow: str
    operators: tuple[Mapping[str, Any], ...]

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON; the inverse of `from_dict`."""
        return {"flow": self.flow, "operators": [dict(operator) for operator in self.operators]}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> "FlowFingerprint":
        """Read what `as_dict` gave."""
        return cls(saved["flow"], tuple(saved["operators"]))

    def require_same(self, saved: "FlowFingerprint", where: object) -> None:
        """Refuse a checkpoint whose state this flow could not use, saying what differs."""
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
