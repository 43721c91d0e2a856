"""Conversion of exceptions to an exit code, a message and a hint.

The class of an error determines its exit code, so a new error class inherits one from its parent. Spark errors are
reduced to the sentences a user can act on; their stack traces are for ``--debug``.
"""

import re
from dataclasses import asdict, dataclass
from enum import IntEnum

from dovetail.core import errors
from dovetail.spark.plan.spark_errors import explain_spark


class ExitCode(IntEnum):
    """The meaning of the command's exit codes. Scripts rely on them: a meaning never changes."""

    OK = 0
    INTERNAL = 1
    REQUEST = 2
    RELATION = 3
    CONFLICT = 4
    INTERRUPTED = 130
    BROKEN_PIPE = 141


class SourceError(errors.PlanError):
    """Input rows cannot be read: a missing path, an unknown format, a malformed file."""


class SparkStartError(errors.PlanError):
    """Spark cannot be started: no Java, an unknown master, an invalid setting."""


class SparkFailure(Exception):  # noqa: N818 -- an error of Spark, as text
    """The full text of a Spark error."""


class Interrupted(Exception):  # noqa: N818 -- what happened, not an error
    """The user pressed Ctrl-C; the message says what happened to the work."""


@dataclass(frozen=True)
class Failure:
    """An error as shown to the user."""

    exit_code: ExitCode
    kind: str
    message: str
    hint: str | None = None

    def as_dict(self) -> dict[str, object]:
        """The document printed by ``--json``."""
        fields = asdict(self)
        return {"error": {"class": fields["kind"], "message": fields["message"], "hint": fields["hint"]}}


# The first class that matches determines the code, so subclasses come before their parents.
_CODE_OF_CLASS: tuple[tuple[type[BaseException], ExitCode], ...] = (
    (errors.RelationConflict, ExitCode.CONFLICT),
    (errors.RelationError, ExitCode.RELATION),
    (errors.StateError, ExitCode.RELATION),
    (errors.InternalError, ExitCode.INTERNAL),
    (errors.DovetailError, ExitCode.REQUEST),
    (Interrupted, ExitCode.INTERRUPTED),
    (KeyboardInterrupt, ExitCode.INTERRUPTED),
)
_REPORT = "This is a defect in Dovetail. Please report it, with the output of the same command with --debug."
# In this order: the first contains the second.
_COMMAND_OF_METHOD = {
    "stop(drain=True)": "dovetail stop --drain",
    "drain=True": "dovetail stop --drain",
    "resume_from=": "--resume-from",
}
_MORE_MEMORY = "Give Spark more memory, for example with --conf spark.driver.memory=4g."


def failure_of(error: BaseException) -> Failure:
    """Convert an exception to a failure for the user."""
    if isinstance(error, SparkFailure) or type(error).__module__.partition(".")[0] in ("pyspark", "py4j"):
        return _failure_of_spark(error)
    code = next((code for kind, code in _CODE_OF_CLASS if isinstance(error, kind)), None)
    if isinstance(error, errors.DovetailError) and code is not None:
        hint = error.hint or (_REPORT if code is ExitCode.INTERNAL else None)
        return Failure(code, type(error).__name__, _for_commands(error.message), hint and _for_commands(hint))
    if code is ExitCode.INTERRUPTED:
        return Failure(code, "Interrupted", str(error) or "Interrupted.")
    if isinstance(error, OSError) and error.strerror:
        # The operating system refused a file of the relation: disk full, no permission, I/O error.
        place = f"{error.filename}: " if error.filename else ""
        return Failure(ExitCode.RELATION, type(error).__name__, f"{place}{error.strerror}.")
    text = _first_line(str(error))
    message = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return Failure(ExitCode.INTERNAL, "InternalError", message, _REPORT)


def _for_commands(text: str) -> str:
    """Name the commands instead of the methods that do the same.

    >>> _for_commands("Stop the old flow with stop(drain=True), and use resume_from= this one.")
    'Stop the old flow with dovetail stop --drain, and use --resume-from this one.'
    """
    for method, command in _COMMAND_OF_METHOD.items():
        text = text.replace(method, command)
    return text


# -------------------------------------------------------------------- Spark's own errors

_LOST_RECORDS = "not available in Kafka any more"
_LOST_MESSAGE = "Kafka no longer has records that the flow has not read yet"
_LOST_HINT = (
    "All before them is loaded. To continue without them, set failOnDataLoss: false in the options of the source."
)
_PYTHON_ERROR = re.compile(r"^(?P<kind>[A-Za-z_][\w.]*): (?P<message>.*)", re.MULTILINE)


def _failure_of_spark(error: BaseException) -> Failure:
    text = str(error)
    if "java.lang.OutOfMemoryError" in text:
        return Failure(ExitCode.INTERNAL, "SparkError", "Spark ran out of memory.", _MORE_MEMORY)
    if _LOST_RECORDS in text:
        reason = re.search(r"^Reason: (.*)", text, re.MULTILINE)
        told = "" if reason is None else f": {_first_line(reason[1]).rstrip('.')}"
        return Failure(ExitCode.REQUEST, "SourceError", f"{_LOST_MESSAGE}{told}.", _LOST_HINT)
    if "Traceback (most recent call last)" in text:
        return _failure_in_task(text)
    is_stated = re.search(r"\[[A-Z][A-Z0-9_.]*\]", text) is not None and "[INTERNAL_ERROR" not in text
    if is_stated:
        # Spark names a condition if it knows the cause: rows it could not read, a value it could not convert.
        return Failure(ExitCode.REQUEST, "SourceError", explain_spark(error), _hint_of(text))
    return Failure(ExitCode.INTERNAL, "SparkError", explain_spark(error), _REPORT)


def _failure_in_task(text: str) -> Failure:
    """An exception of our own code in a Python worker, of which only the text is available."""
    found = list(_PYTHON_ERROR.finditer(text.rpartition("Traceback (most recent call last)")[2]))
    if not found:
        return Failure(ExitCode.INTERNAL, "InternalError", "A Spark task failed without a message.", _REPORT)
    kind, message = found[-1]["kind"].rpartition(".")[2], found[-1]["message"]
    ours = getattr(errors, kind, None)
    if isinstance(ours, type) and issubclass(ours, errors.DovetailError):
        return failure_of(ours(message))
    number = re.match(r"\[Errno (\d+)\] (.*)", message)
    if number is not None:
        return Failure(ExitCode.RELATION, kind, f"{number[2]}.")
    return Failure(ExitCode.INTERNAL, "InternalError", f"{kind}: {message}", _REPORT)


def _hint_of(text: str) -> str | None:
    if "MALFORMED_RECORD_IN_PARSING" in text:
        return (
            "Correct the rows, set the right --option values, or turn bad values into NULL with --option "
            "mode=PERMISSIVE."
        )
    return None


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]
