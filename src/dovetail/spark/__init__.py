"""Dovetail on Spark: the only package, besides sources and sinks, that imports pyspark."""
