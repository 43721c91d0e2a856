"""The command line: ``dovetail``. Results on standard output, everything else on standard error, exit codes that mean
something (:class:`dovetail.cli.failures.ExitCode`)."""
