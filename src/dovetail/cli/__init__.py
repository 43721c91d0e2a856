"""The command line: ``dovetail``. Results go to standard output, everything else to standard error.

Exit codes have a fixed meaning: see `dovetail.cli.failures.ExitCode`.
"""
