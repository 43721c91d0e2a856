"""Processes of flows killed with SIGKILL, again and again over one input: exactly the oracle's rows come out."""

import random
import signal
import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))

from scenes import SCENES, Enrich, Scene

SEED = 40_961
KILLS_EVERY_DAY = 2
FILES_PER_KILL = 2


@pytest.mark.parametrize("kind", SCENES, ids=lambda kind: kind.__name__)
def test_flow_killed_at_steps_and_at_random_times_is_exact(
    kind: type[Scene], tmp_path: Path, fault_rounds: int
) -> None:
    seed = SEED + SCENES.index(kind)
    print("seed", seed)
    chance = random.Random(seed)
    scene = kind(tmp_path)
    scene.add(scene.files_before)
    kills = KILLS_EVERY_DAY if fault_rounds < 10 else 2 * fault_rounds
    if kills > KILLS_EVERY_DAY and kind is Enrich:
        assert scene.run("flow.fingerprint.linked") == -signal.SIGKILL
    ends: Counter[str] = Counter()
    for number in range(kills):
        scene.add(FILES_PER_KILL)
        if number % 5 == 4:
            code, where = scene.run(kill_after_s=4 + 8 * chance.random()), "at a random time"
        else:
            place = number - number // 5
            points = scene.points
            where = f"{points[place % len(points)]}:{1 + chance.randrange(2) * (place >= len(points))}"
            code = scene.run(where)
        assert code in (-signal.SIGKILL, scene.victim.FAILED, scene.victim.DONE), f"{where}: {code}\n{scene.said()}"
        end = {-signal.SIGKILL: "killed", scene.victim.FAILED: "worker killed"}.get(code, "not reached")
        print(f"{number + 1}. {where}: {end}", flush=True)
        ends[end] += 1
        scene.check_so_far()
    print(dict(ends))
    assert ends["killed"] + ends["worker killed"] >= kills * 0.8
    assert scene.run() == scene.victim.DONE, scene.said()
    scene.check_end()
