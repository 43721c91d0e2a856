"""Orders enriched, given their surrogate keys and loaded into a real PostgreSQL."""

from pathlib import Path
from typing import Any, ClassVar

from scenes import Scene

from dovetail.relation import Relation
from dovetail.testing.faults import load_program
from dovetail.testing.flows import Feed

__all__ = ["SERVERS", "Load"]

_SERVICES = Path(__file__).parents[1] / "services"
SERVERS = load_program(_SERVICES / "servers.py")
_COLUMNS = "n bigint, source text, order_id bigint, customer bigint, city text, sk bigint"


class Load(Scene):
    """A warehouse's load; `postgres` is set before the first one is made."""

    victim = load_program(_SERVICES / "load_victim.py")
    points = ()
    postgres: ClassVar[Any]

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.feed = Feed(root / "feed")
        self._table = f"orders_{root.name}"
        (root / "password").write_text(self.postgres.password)
        self.postgres.execute(f"CREATE TABLE IF NOT EXISTS {self._table} ({_COLUMNS})")

    @property
    def command(self) -> list[str]:
        return [*super().command, str(self.postgres.port), self._table]

    def add(self, files: int) -> None:
        for _ in range(files):
            self.feed.add(self.victim.orders(len(self.feed.files())))

    def check_so_far(self) -> None:
        repeated = self.postgres.execute(f"SELECT n, count(*) FROM {self._table} GROUP BY n HAVING count(*) > 1")
        assert repeated == [], f"loaded twice: {repeated[:3]}"

    def check_end(self) -> None:
        city_of = {row["customer"]: row["city"] for row in self.victim.CITY_OF}
        rows = sorted(self.feed.rows(), key=lambda row: row["n"])
        given = [(r["n"], r["source"], r["order_id"], r["customer"], city_of.get(r["customer"])) for r in rows]
        loaded = self.postgres.execute(f"SELECT n, source, order_id, customer, city, sk FROM {self._table} ORDER BY n")
        assert [row[:5] for row in loaded] == given
        numbers: dict[Any, int] = {}
        for row in loaded:
            assert numbers.setdefault((row[1], row[2]), row[5]) == row[5], "a source key has two numbers"
        assert len(set(numbers.values())) == len(numbers), "a number was given twice"
        keys = Relation.open(self.root / "keys").to_arrow().to_pylist()
        assert {(row["source"], row["order_id"]): row["sk"] for row in keys} == numbers
        listed = "SELECT table_name FROM information_schema.tables WHERE table_name LIKE 'dovetail%'"
        left = [name for (name,) in self.postgres.execute(listed) if name != "dovetail_flows"]
        assert len(left) <= 2, f"staging tables were left behind: {left}"
        self._check_checkpoint()
