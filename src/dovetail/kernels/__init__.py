"""Compiled kernels: arrays in, arrays out; no Arrow, no Spark.

Every kernel works on int64 join codes and int32 or int64 row numbers. numba compiles kernels on first use. The compiled
code is kept in a private cache directory: numba's default (beside the source) is read-only in many installations, and
because the cache is executable code, no other user may be able to write to it.

Importing this package sets that directory, which must happen before any kernel is decorated. If `NUMBA_CACHE_DIR` is
set, it is the parent of the directory.
"""

import numba

from dovetail.kernels._cache import choose_cache_directory

# numba reads the setting when a function is decorated. The environment stays unchanged: a child process may run with
# another DOVETAIL_FORCE_BUCKETS and must not inherit a directory of code compiled for this one.
if not numba.config.DISABLE_JIT:
    numba.config.CACHE_DIR = str(choose_cache_directory(configured=numba.config.CACHE_DIR))
