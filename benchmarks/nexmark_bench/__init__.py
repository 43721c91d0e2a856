"""The parts of `nexmark.py`: data, queries, engines, measurements, report."""
