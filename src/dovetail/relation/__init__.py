"""The relation on disk: layout, versions, shards, scan and index."""

from dovetail.relation.format import CODE_COLUMN, RelationStats, ShardStats
from dovetail.relation.io import Disk, IoMode, SimulatedDisk
from dovetail.relation.keys import compute_codes, keys_equal
from dovetail.relation.relation import Relation, VersionInfo
from dovetail.relation.shard_reader import Block, ShardReader
from dovetail.relation.version_log import VacuumReport

__all__ = [
    "CODE_COLUMN",
    "Block",
    "Disk",
    "IoMode",
    "Relation",
    "RelationStats",
    "ShardReader",
    "ShardStats",
    "SimulatedDisk",
    "VacuumReport",
    "VersionInfo",
    "compute_codes",
    "keys_equal",
]
