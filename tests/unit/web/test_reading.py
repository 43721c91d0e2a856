"""What is read from a checkpoint, against a plain recomputation from the same records."""

import json
from pathlib import Path

import pytest

from dovetail.core.errors import PlanError, StateError
from dovetail.storage.running import running
from dovetail.storage.stop_request import ask_to_stop
from dovetail.testing.checkpoints import WrittenFlow
from dovetail.web.finding import checkpoints_of
from dovetail.web.history import MOST_BATCHES, History
from dovetail.web.reading import FlowReader


def records(flow: WrittenFlow) -> list[dict[str, object]]:
    """The micro-batches of a journal, read without our reader."""
    lines = [line for file in sorted((flow.root / "journal").iterdir()) for line in file.read_text().splitlines()]
    return [record for record in map(json.loads, lines) if record["kind"] == "batch"]


@pytest.fixture
def flow(tmp_path: Path) -> WrittenFlow:
    written = WrittenFlow(tmp_path / "checkpoint", "orders")
    written.start()
    written.run(50)
    return written


def view_of(flow: WrittenFlow) -> dict[str, object]:
    reader = FlowReader(flow.checkpoint)
    reader.refresh()
    view = reader.view()
    json.dumps(view)
    return view


def test_view_has_the_last_commit_and_the_rates_of_the_journal(flow: WrittenFlow) -> None:
    view, lines = view_of(flow), records(flow)
    taken = [line["operators"][0]["in"] for line in lines]  # type: ignore[index]
    assert (view["flow"], view["batch"], view["history"]) == ("orders", 49, 50)
    assert view["rates"] == {"in": sum(taken[-5:]) / 10, "out": sum(taken[-5:]) / 10}
    (operator,) = view["operators"]  # type: ignore[misc]
    assert operator["totals"]["stream_tuples_in"] == sum(taken)
    assert operator["in_per_s"] == taken[-1] / 2
    assert operator["memory_bytes"] == lines[-1]["operators"][0]["memory"]  # type: ignore[index]
    assert view["side_rows"] == {0: sum(line["side"][0] for line in lines)}  # type: ignore[index]


def test_long_history_becomes_few_points_that_keep_totals_and_peaks() -> None:
    history = History()
    for batch in range(9_999):
        history.add(
            {
                "batch": batch,
                "wall_ms": batch * 1000,
                "elapsed_ms": 1000,
                "took_ms": 900 if batch == 5_000 else 100,
                "rows": 3,
                "side": [],
                "operators": [{"in": 3, "hits": 1, "absent": 1, "pending": 0, "memory": batch}],
            }
        )
    series = history.series(240)
    assert {len(column) for column in series.values()} == {239}
    assert max(value for value in series["took_ms"] if value is not None) == 900
    # Every bucket but the first micro-batch, whose time is its own duration, has three rows per second.
    assert set(series["in"][1:]) == {3.0}
    assert series["hit"][-1] == round(2 / 3, 4)
    assert series["memory"][-1] == 9_998
    assert list(series["time_ms"]) == sorted(time for time in series["time_ms"] if time is not None)


def test_history_is_bounded() -> None:
    history = History()
    line = {"wall_ms": 1, "elapsed_ms": 1, "took_ms": 1, "rows": 0, "side": [], "operators": []}
    for batch in range(MOST_BATCHES + 500):
        history.add({"batch": batch, **line})
    assert (len(history), len(history.recent)) == (MOST_BATCHES, 20)


def test_repeated_micro_batch_counts_once(flow: WrittenFlow) -> None:
    from dovetail.storage.journal import Journal

    Journal(flow.root).append(records(flow)[-1])
    assert view_of(flow)["history"] == 50


def test_states_of_a_flow(tmp_path: Path) -> None:
    flow = WrittenFlow(tmp_path / "c", "orders")
    reader = FlowReader(flow.checkpoint)

    def state() -> str:
        reader.refresh()
        return reader.state()

    assert state() == "new"
    with running(flow.checkpoint):
        assert state() == "starting"
        flow.start()
        flow.run(1)
        assert state() == "running"
        ask_to_stop(flow.checkpoint, True, 5)
        assert state() == "stopping"
        (flow.root / "stop.json").unlink()
    assert state() == "killed"
    flow.end()
    assert state() == "stopped"
    flow.start()
    flow.end(StateError("The disk is full.", hint="Free some space."))
    assert state() == "failed"
    assert reader.view()["events"][0]["error"] == {
        "class": "StateError",
        "message": "The disk is full.",
        "hint": "Free some space.",
    }
    (flow.root / "journal" / "000001.jsonl").write_text('{"kind":"journal","format":99}\n')
    assert state() == "unreadable"
    assert "format 99" in reader.view()["problem"]["message"]


def test_refresh_reports_only_changes(flow: WrittenFlow) -> None:
    reader = FlowReader(flow.checkpoint)
    assert [reader.refresh(), reader.refresh()] == [True, False]
    flow.run(1)
    assert [reader.refresh(), reader.refresh()] == [True, False]


def test_damaged_commit_is_a_problem_and_the_rest_is_shown(flow: WrittenFlow) -> None:
    newest = flow.root / "commits" / "00000049.json"
    newest.write_text(newest.read_text().replace('"batch": 49', '"batch": 48'))
    view = view_of(flow)
    assert view["state"] == "unreadable"
    assert "digest" in view["problem"]["message"]  # type: ignore[index]
    assert view["history"] == 50


def test_checkpoints_are_found_by_name_by_pipeline_and_below_a_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dovetail.pipeline.starter import write_starter

    write_starter(tmp_path / "shop")
    WrittenFlow(tmp_path / "shop" / "checkpoint", "orders")
    monkeypatch.chdir(tmp_path)
    expected = [str(tmp_path / "shop" / "checkpoint")]
    assert checkpoints_of([]) == expected
    assert checkpoints_of(["shop/pipeline.yaml", "shop/checkpoint"]) == expected
    monkeypatch.chdir(tmp_path / "shop" / "landing")
    with pytest.raises(PlanError, match="no flow's checkpoint"):
        checkpoints_of([])


def test_directory_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="is not the checkpoint of a flow"):
        FlowReader(tmp_path).require_flow()


def test_journal_of_format_1_is_read(tmp_path: Path) -> None:
    """As the first version wrote it; never to be changed."""
    (tmp_path / "dovetail" / "journal").mkdir(parents=True)
    lines = [
        '{"kind":"journal","format":1}',
        '{"kind":"started","at_ms":1,"pid":7,"host":"h","dovetail":"0.1.0","flow":"orders","trigger":"2 seconds",'
        '"budgets":{"1-enrich":1000},"picture":{"nodes":[{"id":"sink","kind":"sink","title":"noop","detail":"",'
        '"facts":{}}],"edges":[]}}',
        '{"kind":"plan","text":"step 1-enrich"}',
        '{"kind":"batch","batch":0,"time_ms":5,"wall_ms":5,"elapsed_ms":null,"took_ms":40,"drain":false,"rows":8,'
        '"side":[1],"behind":null,"operators":[{"name":"1-enrich","in":4,"out":8,"hits":1,"absent":1,"unmatched":0,'
        '"shed":0,"pending":3,"oldest_ms":0,"memory":100,"state":20,"version":1}]}',
        '{"kind":"stop requested","at_ms":6,"drain":true}',
        '{"kind":"stopped","at_ms":7}',
    ]
    (tmp_path / "dovetail" / "journal" / "000001.jsonl").write_text("\n".join(lines) + "\n")
    reader = FlowReader(tmp_path)
    reader.refresh()
    view = reader.view()
    assert (view["flow"], view["state"], view["history"], view["plan"]) == ("orders", "stopped", 1, "step 1-enrich")
    assert view["rates"] == {"in": 2.0, "out": 4.0}
    assert (view["series"]["hit"], view["side_rows"], view["budget_bytes"]) == ([0.5], {0: 1}, 1000)
    assert [event["kind"] for event in view["events"]] == ["stopped", "stop requested", "started"]
