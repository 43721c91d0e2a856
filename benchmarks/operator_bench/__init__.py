"""The sections of ``benchmarks/operators.py``."""
