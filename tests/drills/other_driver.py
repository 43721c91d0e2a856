"""A second driver in a process of its own, told on stdin what to run, and where it is suspended or killed.

A line of JSON names the drill's directory, checkpoint and target, and the fault point at which the whole process group,
with Spark's JVM, is sent a SIGSTOP or a SIGKILL. It prints ``suspended`` before the first, and at the end of a run one
line of JSON with the error, if there was one.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from dovetail.testing.faults import load_program
from dovetail.testing.flows import wait_until
from dovetail.testing.sessions import SHORT_LIVED, local_session

DRILLING = load_program(Path(__file__).with_name("drilling.py"))


def run(spark: Any, task: dict[str, Any]) -> dict[str, Any]:
    """Run the flow as the task says."""
    name, _, nth = (task["suspend_at"] or task["kill_at"]).partition(":")
    left = int(nth or "1")

    def strike(point: str) -> None:
        nonlocal left
        if point == name:
            left -= 1
            if left == 0 and task["suspend_at"]:
                print("suspended", flush=True)
                os.killpg(os.getpgrp(), signal.SIGSTOP)
                # A thread may go on for a moment until the signal has reached it.
                wait_until(Path(task["wake"]).exists, "the end of the suspension")
            elif left == 0:
                os.killpg(os.getpgrp(), signal.SIGKILL)

    sink = DRILLING.target_of(task["target"]).sink()
    with DRILLING.fault_hook(strike):
        try:
            flow = DRILLING.flow_on(spark, Path(task["root"]))
            query = flow.write(sink, checkpoint=task["checkpoint"], trigger="available-now", keep_commits=3)
            query.awaitTermination()
        except Exception as error:  # noqa: BLE001 -- the test says which it may be
            return {"error": type(error).__name__, "text": str(error)}
    return {"error": None, "text": ""}


def main(scratch: Path, jars: str) -> None:
    """Do what stdin says, line by line."""
    spark = local_session(scratch, {**SHORT_LIVED, "spark.jars": jars})
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(run(spark, json.loads(line))), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
