"""Exit codes by class of error, and what is left of Spark's errors. The long texts are Spark's own, shortened."""

import pytest
from pyspark.errors import AnalysisException, PythonException

from dovetail.cli.failures import ExitCode, Interrupted, failure_of
from dovetail.core import errors
from dovetail.spark.plan.spark_errors import explain_spark

MALFORMED_CSV = """An error occurred while calling o125.collectToPython.
: org.apache.spark.SparkException: [FAILED_READ_FILE.NO_HINT] Encountered error while reading file file:///d/bad.csv.  \
SQLSTATE: KD001
\tat org.apache.spark.sql.errors.QueryExecutionErrors$.cannotReadFilesError(QueryExecutionErrors.scala:920)
Caused by: org.apache.spark.SparkException: [MALFORMED_RECORD_IN_PARSING.WITHOUT_SUGGESTION] Malformed records are \
detected in record parsing: [x,b].
Parse Mode: FAILFAST. To process malformed records as null result, try setting the option 'mode' as 'PERMISSIVE'.  \
SQLSTATE: 22023
\t... 19 more
Caused by: org.apache.spark.SparkRuntimeException: [MALFORMED_CSV_RECORD] Malformed CSV record: x,b,c SQLSTATE: KD000
\t... 26 more
"""
NOT_PARQUET = """An error occurred while calling o317.load.
: org.apache.spark.SparkException: [FAILED_READ_FILE.CANNOT_READ_FILE_FOOTER] Encountered error while reading file \
file:/d/bad.parquet. Could not read footer. Please ensure that the file is in either ORC or Parquet format.
If not, please convert it to a valid format. SQLSTATE: KD001
\tSuppressed: org.apache.spark.SparkException: Exception thrown in awaitResult
\t\tat org.apache.spark.util.SparkThreadUtils$.awaitResult(SparkThreadUtils.scala:66)
Caused by: java.lang.RuntimeException: file:/d/bad.parquet is not a Parquet file (length is too low: 11)
"""
LOST = """An error occurred while calling o12.collectToPython.
: org.apache.spark.SparkException: Job aborted due to stage failure: Task 0 in stage 3.0 failed 1 times, most recent \
failure: Lost task 0.0 in stage 3.0 (TID 7) (127.0.0.1 executor driver): java.lang.IllegalStateException: gone
\tat x.y(Z.scala:1)
"""
IN_TASK = """An exception was thrown from the Python worker:
Traceback (most recent call last):
  File "shard_writer.py", line 43, in run
    raise {}
{}
"""


class JavaError(Exception):
    """Stands in for py4j's error, which cannot be made without a running JVM."""


JavaError.__module__ = "py4j.protocol"


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (errors.PlanError, 2),
        (errors.SchemaError, 2),
        (errors.BudgetError, 2),
        (errors.PromiseError, 2),
        (errors.RelationError, 3),
        (errors.RelationNotFound, 3),
        (errors.RelationCorrupt, 3),
        (errors.RelationReadOnly, 3),
        (errors.StateError, 3),
        (errors.RelationConflict, 4),
        (errors.InternalError, 1),
    ],
)
def test_class_of_error_decides_the_exit_code(kind: type[errors.DovetailError], code: int) -> None:
    failure = failure_of(kind("What was wrong."))
    assert (failure.exit_code, failure.kind, failure.message) == (code, kind.__name__, "What was wrong.")


def test_every_error_of_ours_has_an_exit_code_of_its_own_choosing() -> None:
    internal = {name for name in errors.__all__ if failure_of(getattr(errors, name)("x")).exit_code == 1}
    assert internal == {"InternalError"}


def test_hint_is_kept_apart_from_the_message() -> None:
    failure = failure_of(errors.PlanError("It is not.", hint="Do that."))
    assert failure.as_dict() == {"error": {"class": "PlanError", "message": "It is not.", "hint": "Do that."}}


@pytest.mark.parametrize("error", [KeyboardInterrupt(), Interrupted("Interrupted: nothing was committed.")])
def test_interrupt_is_130(error: BaseException) -> None:
    failure = failure_of(error)
    assert (failure.exit_code, failure.kind) == (130, "Interrupted")
    assert failure.message.startswith("Interrupted")


def test_full_disk_is_about_the_relation_not_a_defect() -> None:
    failure = failure_of(OSError(28, "No space left on device", "r/data/0/x.rows"))
    assert (failure.exit_code, failure.message) == (3, "r/data/0/x.rows: No space left on device.")


def test_unknown_error_is_a_defect_with_one_line() -> None:
    failure = failure_of(RuntimeError("first line\nsecond line"))
    assert (failure.exit_code, failure.message) == (1, "RuntimeError: first line")
    assert failure.hint is not None
    assert "report" in failure.hint


def test_malformed_rows_are_named_with_their_file() -> None:
    failure = failure_of(JavaError(MALFORMED_CSV))
    assert failure.exit_code == ExitCode.REQUEST
    assert failure.message == ("Encountered error while reading file file:///d/bad.csv. Malformed CSV record: x,b,c.")
    assert failure.hint is not None
    assert "mode=PERMISSIVE" in failure.hint


def test_innermost_reason_is_told_and_what_was_suppressed_is_not() -> None:
    assert explain_spark(JavaError(NOT_PARQUET)) == (
        "Encountered error while reading file file:/d/bad.parquet. "
        "file:/d/bad.parquet is not a Parquet file (length is too low: 11)."
    )


def test_analysis_error_is_its_first_sentence() -> None:
    error = AnalysisException("[PATH_NOT_FOUND] Path does not exist: file:/d/x.y/nope. SQLSTATE: 42K03")
    failure = failure_of(error)
    assert (failure.exit_code, failure.message) == (2, "Path does not exist: file:/d/x.y/nope.")


@pytest.mark.parametrize("text", [LOST, "[INTERNAL_ERROR] Spark has a bug. SQLSTATE: XX000"])
def test_job_that_died_without_a_known_cause_is_not_the_users_fault(text: str) -> None:
    failure = failure_of(JavaError(text))
    assert failure.exit_code == ExitCode.INTERNAL
    assert "\n" not in failure.message


def test_lack_of_memory_says_how_to_give_more() -> None:
    failure = failure_of(JavaError("x\n: java.lang.OutOfMemoryError: Java heap space\n\tat y"))
    assert failure.exit_code == ExitCode.INTERNAL
    assert failure.hint is not None
    assert "spark.driver.memory" in failure.hint


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        ("OSError: [Errno 28] No space left on device", 3, "No space left on device."),
        ("dovetail.core.errors.RelationCorrupt: r/x.rows is damaged.", 3, "r/x.rows is damaged."),
        ("dovetail.core.errors.InternalError: rows of several shards.", 1, "rows of several shards."),
        ("KeyError: 'x'", 1, "KeyError: 'x'"),
    ],
)
def test_error_in_a_task_counts_like_the_same_error_here(line: str, code: int, message: str) -> None:
    failure = failure_of(PythonException(IN_TASK.format(line.partition(":")[0], line)))
    assert (failure.exit_code, failure.message) == (code, message)
