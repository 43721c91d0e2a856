"""Parts of `benchmarks/metadata.py`."""
