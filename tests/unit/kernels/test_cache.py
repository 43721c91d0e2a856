"""Where compiled kernels are kept: privately, apart for each kind of code, and somewhere in any case."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from dovetail.kernels import _cache

SHOW_DIRECTORY = "import numba, dovetail.kernels; print(numba.config.CACHE_DIR)"


def directory_seen_by(program=SHOW_DIRECTORY, **environment):
    completed = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False
    )
    assert completed.returncode == 0, completed.stderr
    return Path(completed.stdout.strip())


def test_directory_is_private_and_below_the_cache_home(tmp_path):
    directory = directory_seen_by(XDG_CACHE_HOME=str(tmp_path), HOME="/nonexistent")
    assert directory.parent == tmp_path / "dovetail"
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700


def test_directory_is_below_the_home_directory_by_default(tmp_path):
    assert directory_seen_by(HOME=str(tmp_path)).parent == tmp_path / ".cache" / "dovetail"


def test_a_configured_directory_is_the_parent(tmp_path):
    assert directory_seen_by(NUMBA_CACHE_DIR=str(tmp_path), HOME="/nonexistent").parent == tmp_path


def test_numba_imported_earlier_is_told_too(tmp_path):
    program = f"import numba\n{SHOW_DIRECTORY}"
    assert directory_seen_by(program, HOME=str(tmp_path)).parent == tmp_path / ".cache" / "dovetail"


def test_forced_buckets_have_a_directory_of_their_own_that_children_do_not_inherit(tmp_path):
    program = (
        "import os, subprocess, sys, dovetail.kernels\n"
        "del os.environ['DOVETAIL_FORCE_BUCKETS']\n"
        f"subprocess.run([sys.executable, '-c', {SHOW_DIRECTORY!r}], check=True)"
    )
    forced = directory_seen_by(HOME=str(tmp_path), DOVETAIL_FORCE_BUCKETS="4")
    child_of_forced = directory_seen_by(program, HOME=str(tmp_path), DOVETAIL_FORCE_BUCKETS="4")
    assert forced.name == f"{child_of_forced.name}-buckets-4"
    assert child_of_forced == directory_seen_by(HOME=str(tmp_path))


def test_a_home_that_cannot_be_written_leads_to_a_temporary_directory_removed_at_exit(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    directory = directory_seen_by(HOME=str(blocked), TMPDIR=str(tmp_path))
    assert directory.parent == tmp_path
    assert not directory.exists()


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_a_directory_that_others_can_write_to_is_not_used(tmp_path, monkeypatch, mode):
    trusted = _cache.choose_cache_directory(str(tmp_path))
    trusted.chmod(mode)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    chosen = _cache.choose_cache_directory(str(tmp_path))
    assert chosen != trusted
    assert stat.S_IMODE(chosen.stat().st_mode) == 0o700


def test_a_directory_of_another_user_is_not_used(tmp_path, monkeypatch):
    foreign = _cache.choose_cache_directory(str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: foreign.stat().st_uid + 1)
    assert not _cache._is_private(foreign)


def test_changed_sources_get_another_directory(tmp_path, monkeypatch):
    before = _cache.choose_cache_directory(str(tmp_path))
    (tmp_path / "kernel.py").write_text("changed")
    monkeypatch.setattr(_cache, "__file__", str(tmp_path / "_cache.py"))
    assert _cache.choose_cache_directory(str(tmp_path)) != before
