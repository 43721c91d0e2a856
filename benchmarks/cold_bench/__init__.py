"""Lookups in a table that is several times larger than memory: the limit, the data, the contenders, the report."""
