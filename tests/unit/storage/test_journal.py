"""The journal: what was appended comes back, whatever happens to the files between."""

import json
from pathlib import Path

import pytest

from dovetail.core.errors import StateError
from dovetail.storage import journal
from dovetail.storage.journal import Journal, JournalReader


def batches(records: list[dict[str, object]]) -> list[object]:
    return [record["batch"] for record in records]


def append(root: Path, *numbers: int) -> None:
    writer = Journal(root)
    for number in numbers:
        writer.append({"kind": "batch", "batch": number})


def test_reader_gets_every_record_once_as_the_journal_grows(tmp_path: Path) -> None:
    reader = JournalReader(tmp_path)
    assert reader.read_new() == (True, [])
    append(tmp_path, 0, 1)
    assert batches(reader.read_new()[1]) == [0, 1]
    append(tmp_path, 2)
    is_whole, records = reader.read_new()
    assert (is_whole, batches(records)) == (False, [2])
    assert reader.read_new() == (False, [])


def test_journal_is_bounded_and_keeps_at_least_ten_thousand_records(tmp_path: Path) -> None:
    append(tmp_path, *range(20_000))
    files = sorted((tmp_path / "journal").iterdir())
    assert len(files) == journal.KEPT_SEGMENTS
    kept = batches(JournalReader(tmp_path).read_new()[1])
    assert kept == list(range(20_000 - len(kept), 20_000))
    assert 10_000 <= len(kept) <= journal.KEPT_SEGMENTS * journal.LINES_PER_SEGMENT


def test_reader_that_is_slower_than_the_cleanup_starts_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "LINES_PER_SEGMENT", 3)
    reader = JournalReader(tmp_path)
    append(tmp_path, 0, 1)
    reader.read_new()
    append(tmp_path, *range(2, 40))
    is_whole, records = reader.read_new()
    assert is_whole
    assert batches(records) == list(range(40 - len(records), 40))


def test_line_that_is_being_written_is_not_read_before_it_is_whole(tmp_path: Path) -> None:
    append(tmp_path, 0)
    reader, file = JournalReader(tmp_path), tmp_path / "journal" / "000001.jsonl"
    reader.read_new()
    with open(file, "ab") as writer:
        writer.write(b'{"kind":"batch",')
        writer.flush()
        assert reader.read_new() == (False, [])
        writer.write(b'"batch":1}\n')
        writer.flush()
    assert batches(reader.read_new()[1]) == [1]


def test_line_cut_off_by_a_kill_is_left_out_and_the_next_one_is_whole(tmp_path: Path) -> None:
    append(tmp_path, 0)
    with open(tmp_path / "journal" / "000001.jsonl", "ab") as file:
        file.write(b'{"kind":"bat')
    append(tmp_path, 1)
    assert batches(JournalReader(tmp_path).read_new()[1]) == [0, 1]


def test_older_copy_of_a_checkpoint_is_read_as_a_whole(tmp_path: Path) -> None:
    append(tmp_path, 0, 1)
    file = tmp_path / "journal" / "000001.jsonl"
    older = file.read_bytes()
    append(tmp_path, 2)
    reader = JournalReader(tmp_path)
    reader.read_new()
    file.write_bytes(older)
    is_whole, records = reader.read_new()
    assert (is_whole, batches(records)) == (True, [0, 1])


def test_journal_of_a_newer_version_is_refused_by_readers_and_left_alone_by_writers(tmp_path: Path) -> None:
    append(tmp_path, 0)
    file = tmp_path / "journal" / "000001.jsonl"
    newer = json.dumps({"kind": "journal", "format": 2}).encode() + b"\n"
    file.write_bytes(newer)
    with pytest.raises(StateError, match="format 2"):
        JournalReader(tmp_path).read_new()
    append(tmp_path, 1)
    assert file.read_bytes() == newer


def test_disk_that_cannot_take_the_journal_does_not_stop_the_flow(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "journal").write_text("in the way")
    append(tmp_path, 0, 1)
    assert [record.name for record in caplog.records] == ["dovetail.flow"]
    assert "cannot be written" in caplog.text
