"""Compiled kernels: arrays in, arrays out; no Arrow, no Spark.

Every kernel works on int64 join codes and int32 or int64 row numbers. They are compiled by numba on first use
and kept in a private cache directory, because numba's default (beside the source) is read-only in many
installations, and because what it stores is executable: nobody else may be able to write there.

Importing this package chooses that directory, so it must happen before any kernel is decorated; importing a
module of the package does it by itself. `NUMBA_CACHE_DIR`, where set, is the parent of the directory used.
"""

import numba

from dovetail.kernels._cache import choose_cache_directory

# numba reads the setting when a function is decorated. The environment is left alone: a child process may run
# with another DOVETAIL_FORCE_BUCKETS and must not inherit a directory that holds code compiled for this one.
if not numba.config.DISABLE_JIT:
    numba.config.CACHE_DIR = str(choose_cache_directory(configured=numba.config.CACHE_DIR))
