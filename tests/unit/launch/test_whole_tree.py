"""A command's processes are ended wherever they went, and nobody else's are."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing import shared_memory
from pathlib import Path

import psutil
import pytest

from pytest_llmperf.launch import process
from pytest_llmperf.launch.process import WholeTree, is_alive
from tests.waiting import until

# Says that it is there, ends by no SIGTERM, and would tell if it went on.
ENDLESS = """
import os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: pathlib.Path(sys.argv[1] + ".handled").touch())
pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
time.sleep(60)
"""
# Its parent is gone before it begins, and its session is its own.
DAEMON = f"""
import os, sys
if os.fork():
    os._exit(0)
os.setsid()
if os.fork():
    os._exit(0)
{ENDLESS}
"""
FORKS = f"""
import multiprocessing, sys
def endless(path):
    sys.argv[1] = path
    exec({ENDLESS!r}, {{}})
if __name__ == "__main__":
    for number in range(3):
        multiprocessing.get_context("fork").Process(target=endless, args=(sys.argv[1] + str(number),)).start()
    exec({ENDLESS!r}, {{}})
"""
WAYS = {
    "itself": ["{python} one.py {folder}/pid", 1],
    "a shell that goes on": ["bash -c '{python} one.py {folder}/pid; touch {folder}/went-on'", 1],
    "in the background": ["bash -c '{python} one.py {folder}/pid & wait; touch {folder}/went-on'", 1],
    "nohup": ["bash -c 'nohup {python} one.py {folder}/pid & sleep 60'", 1],
    "a session of its own": ["setsid --wait {python} one.py {folder}/pid", 1],
    "a daemon": ["bash -c '{python} daemon.py {folder}/pid; sleep 60'", 1],
    "without an environment": ["env -i {python} one.py {folder}/pid", 1],
    "that forked": ["{python} forks.py {folder}/pid", 4],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, code in (("one", ENDLESS), ("daemon", DAEMON), ("forks", FORKS)):
        (tmp_path / f"{name}.py").write_text(code)
    return tmp_path


@pytest.fixture
def neighbour() -> Iterator[subprocess.Popen[bytes]]:
    """Another launch's process."""
    environment = {**os.environ, "OF": "/another/launch"}
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env=environment) as other:
        yield other
        other.kill()


def pids(folder: Path) -> list[int]:
    return [int(text) for path in folder.glob("pid*") if (text := path.read_text())]


@pytest.mark.parametrize("way", WAYS)
def test_nothing_of_it_runs_after_its_end(folder: Path, way: str, neighbour: subprocess.Popen[bytes]) -> None:
    text, number = WAYS[way]
    words = ["bash", "-c", "exec " + str(text).format(python=sys.executable, folder=folder)]
    environment = {**os.environ, "OF": str(folder)}
    ended = process.watch(
        lambda: process.start(words, environment=environment, log=folder / "log", folder=folder),
        timeout_seconds=30.0,
        poll=lambda: None,
        is_over=lambda: len(pids(folder)) == number,
        tree=WholeTree(f"OF={folder}"),
    )
    assert not ended.timed_out, (folder / "log").read_text()
    assert len(pids(folder)) == number
    assert not [one for one in pids(folder) if psutil.pid_exists(one) and is_alive(psutil.Process(one))]
    assert not [*folder.glob("*.handled"), *folder.glob("went-on")]
    assert neighbour.poll() is None


def test_what_stayed_in_the_background_ends_with_the_command(folder: Path) -> None:
    until_there = f"for _ in {{1..300}}; do [ -s {folder}/pid ] && break; sleep 0.1; done"
    words = ["bash", "-c", f"setsid {sys.executable} one.py {folder}/pid & {until_there}"]
    ended = process.watch(
        lambda: process.start(words, environment={**os.environ, "OF": "it"}, log=folder / "log", folder=folder),
        timeout_seconds=30.0,
        poll=lambda: None,
        tree=WholeTree("OF=it"),
    )
    assert ended.returncode == 0
    assert not is_alive(psutil.Process(pids(folder)[0])) if psutil.pid_exists(pids(folder)[0]) else True
    assert not [*folder.glob("*.handled")]


SHARES = """
import pathlib, sys, time
from multiprocessing import resource_tracker, shared_memory
memory = [shared_memory.SharedMemory(name) for name in sys.argv[2:]]
memory.append(shared_memory.SharedMemory(create=True, size=64))
pathlib.Path(sys.argv[1]).write_text(memory[-1].name)
time.sleep(60)
"""


def test_shared_memory_goes_with_those_who_had_it_alone(folder: Path) -> None:
    before = shared_memory.SharedMemory(create=True, size=64)
    try:
        words = [sys.executable, "-c", SHARES, str(folder / "made"), before.name]
        process.watch(
            lambda: process.start(words, environment={**os.environ, "OF": str(folder)}, log=folder / "log"),
            timeout_seconds=30.0,
            poll=lambda: None,
            is_over=lambda: (folder / "made").exists() and bool((folder / "made").read_text()),
            tree=WholeTree(f"OF={folder}"),
        )
        made = Path("/dev/shm") / (folder / "made").read_text()
        assert not made.exists()
        assert (Path("/dev/shm") / before.name).exists(), "it was there before"
    finally:
        before.close()
        before.unlink()


def test_memory_that_somebody_else_has_too_stays(folder: Path) -> None:
    tree, made = WholeTree(f"OF={folder}"), folder / "made"
    one = subprocess.Popen([sys.executable, "-c", SHARES, str(made)], env={**os.environ, "OF": str(folder)})
    until(lambda: made.exists() and made.read_text())
    other = subprocess.Popen([sys.executable, "-c", SHARES, str(folder / "other"), made.read_text()])
    path = Path("/dev/shm") / made.read_text()
    try:
        until((folder / "other").exists)
        tree.end(set)
        assert one.wait(5) == -9
        assert path.exists()
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()
        path.unlink(missing_ok=True)
        for name in [(folder / "other").read_text()]:
            (Path("/dev/shm") / name).unlink(missing_ok=True)


def test_the_lock_of_an_extension_that_was_being_built_goes_too(folder: Path) -> None:
    (folder / "extension").mkdir()
    (folder / "extension" / "build.ninja").touch()
    files = [folder / "extension" / "lock", folder / "lock"]
    code = f"import time; held = [open(path, 'w') for path in {[*map(str, files)]}]; time.sleep(60)"
    process.watch(
        lambda: process.start(
            [sys.executable, "-c", code], environment={**os.environ, "OF": str(folder)}, log=folder / "log"
        ),
        timeout_seconds=30.0,
        poll=lambda: None,
        is_over=lambda: all(path.exists() for path in files),
        tree=WholeTree(f"OF={folder}"),
    )
    assert [path.exists() for path in files] == [False, True], "whose the other one is nobody knows"
