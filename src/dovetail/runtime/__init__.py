"""What runs in an executor: the tasks of every step, live state, local caches. Nothing here imports pyspark."""
