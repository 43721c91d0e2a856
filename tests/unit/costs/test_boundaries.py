"""The model stands below the operators and apart from Spark."""

import subprocess
import sys


def test_model_and_workloads_import_neither_operators_nor_spark():
    program = (
        "import sys, dovetail.costs, dovetail_lab.workloads\n"
        "print(sorted(n for n in sys.modules if n.startswith(('pyspark', 'dovetail.joins', 'pandas'))))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
