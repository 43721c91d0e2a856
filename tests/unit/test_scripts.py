"""The shell scripts behind ``make setup``, run on a made-up machine with its own Java and user."""

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
TOOLS = ["bash", "cat", "dirname", "env", "grep", "mktemp", "rm", "sed", "tail"]

Run = Callable[..., subprocess.CompletedProcess[str]]


def write_command(path: Path, body: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{body}\n")
    path.chmod(0o755)


def install_java(home: Path, version: str) -> Path:
    """Put a command in ``home`` that answers like the Java of that version."""
    answer = f"    java.home = {home}\n    java.specification.version = {version}\n"
    write_command(home / "bin" / "java", f"cat >&2 <<'END'\n{answer}END")
    return home


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A machine with the basic tools, no Java, no apt-get and no root."""
    for tool in TOOLS:
        found = shutil.which(tool)
        assert found is not None
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / tool).symlink_to(found)
    write_command(tmp_path / "bin" / "id", "echo 1000")
    return tmp_path


@pytest.fixture
def java_home(machine: Path) -> Run:
    def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {
            "PATH": str(machine / "bin"),
            "DOVETAIL_JVM_DIRECTORY": str(machine / "jvm"),
            **variables,
        }
        command = [str(SCRIPTS / "java-home"), *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    return run


def let_apt_install(machine: Path, java_version: str) -> None:
    """Give the machine an apt-get that installs a Java where Debian puts it, and note how it was called."""
    template = install_java(machine / "package", java_version)
    script = f"""
        echo "$@" >> {machine}/apt.log
        if [ "$2" = install ]; then {shutil.which("mkdir")} -p {machine}/jvm
            {shutil.which("cp")} -r {template} {machine}/jvm/java; fi"""
    write_command(machine / "bin" / "apt-get", script)


def test_java_home_variable_wins_over_path(machine: Path, java_home: Run) -> None:
    install_java(machine, "21")
    chosen = install_java(machine / "chosen", "17")
    assert java_home(JAVA_HOME=str(chosen)).stdout == f"{chosen}\n"


def test_java_too_old_in_variable_yields_to_the_one_on_the_path(machine: Path, java_home: Run) -> None:
    install_java(machine, "17")
    old = install_java(machine / "old", "11")
    assert java_home(JAVA_HOME=str(old)).stdout == f"{machine}\n"


@pytest.mark.parametrize("version", ["1.8", "11", "16"])
def test_java_too_old_is_never_taken(machine: Path, java_home: Run, version: str) -> None:
    install_java(machine, version)
    finished = java_home()
    assert (finished.returncode, finished.stdout) == (1, "")


def test_java_of_the_distribution_is_found_when_the_path_has_an_older_one(machine: Path, java_home: Run) -> None:
    install_java(machine, "11")
    installed = install_java(machine / "jvm" / "java-21", "21")
    assert java_home().stdout == f"{installed}\n"


@pytest.mark.parametrize("arguments", [[], ["--install"]])
def test_no_java_and_no_permission_gives_one_line_that_says_what_to_install(
    java_home: Run, arguments: list[str]
) -> None:
    finished = java_home(*arguments)
    assert finished.returncode == 1
    assert finished.stdout == ""
    assert len(finished.stderr.splitlines()) == 1
    assert "Java 17 or newer is needed" in finished.stderr
    assert "default-jre-headless" in finished.stderr


def test_apt_that_may_not_be_used_is_not_called(machine: Path, java_home: Run) -> None:
    let_apt_install(machine, "17")
    finished = java_home("--install")
    assert finished.returncode == 1
    assert "not permitted" in finished.stderr
    assert not (machine / "apt.log").exists()


def test_root_installs_the_distributions_java(machine: Path, java_home: Run) -> None:
    let_apt_install(machine, "17")
    write_command(machine / "bin" / "id", "echo 0")
    finished = java_home("--install")
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.startswith(f"{machine}/")
    calls = (machine / "apt.log").read_text().splitlines()
    assert calls[0] == "-q update"
    assert calls[1].endswith("default-jre-headless")


def test_java_that_apt_brings_too_old_is_refused_in_one_line(machine: Path, java_home: Run) -> None:
    let_apt_install(machine, "11")
    write_command(machine / "bin" / "id", "echo 0")
    finished = java_home("--install")
    assert finished.returncode == 1
    complaint = [line for line in finished.stderr.splitlines() if line.startswith("dovetail:")]
    assert len(complaint) == 1


def test_setup_refuses_an_old_python_in_one_line(machine: Path) -> None:
    write_command(machine / "bin" / "oldpython", "exit 1")
    project = machine / "project"
    shutil.copytree(SCRIPTS, project / "scripts")
    finished = subprocess.run(
        [str(project / "scripts" / "setup")],
        env={**os.environ, "PATH": str(machine / "bin"), "PYTHON": "oldpython"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 1
    assert finished.stderr.splitlines() == [finished.stderr.strip()]
    assert "Python 3.11 or newer is needed" in finished.stderr
