"""How hooks come into the processes of a command: with a torch that is none, and hooks that leave a mark."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import pytest_llmperf
from tests.golden import Golden

pytestmark = pytest.mark.processes

WAY_IN = Path(pytest_llmperf.__file__).parent / "worker" / "script" / "path"

# Of the module itself: what code may ask of it, which is as without us.
ASKED = """
import importlib.util, inspect, json, pickle, re, sys
assert importlib.util.find_spec("torch").name == "torch"
import torch
print(json.dumps([
    re.sub("0x[0-9a-f]+", "", repr((torch.__spec__, torch.__loader__))), sorted(vars(torch.__loader__)),
    torch.__spec__.loader is torch.__loader__,
    inspect.getsource(torch), inspect.getsource(torch.Thing), pickle.dumps(torch.Thing()).hex(), sorted(vars(torch)),
    [type(finder).__name__ for finder in sys.meta_path if type(finder).__module__ == "sitecustomize"],
]))
"""


@dataclass
class Command:
    """Python's words, as a launcher starts them."""

    folder: Path
    """The launch's."""
    work: Path

    def run(self, *words: str, path: str = "", hooked: bool = True) -> str:
        """Its output; ``path`` is what the user has on PYTHONPATH."""
        paths = [str(WAY_IN)] if hooked else []
        variables = {"PYTHONPATH": os.pathsep.join([*paths, *filter(None, [path]), str(self.work / "site")])}
        variables |= {"LLMPERF_SCRIPT": str(self.folder)} if hooked else {}
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")} | variables
        command = [sys.executable, *words]
        done = subprocess.run(command, cwd=self.work, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    @property
    def num_watched(self) -> int:
        """Processes that hooks came into."""
        return len(list(self.folder.glob("watched-*")))

    def write(self, name: str, text: str) -> str:
        path = self.work / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return str(path)


@pytest.fixture
def command(tmp_path: Path) -> Command:
    folder = tmp_path / "launch"
    hooks = folder / "package" / "pytest_llmperf" / "worker" / "script"
    hooks.mkdir(parents=True)
    for each in (hooks, hooks.parent, hooks.parent.parent):
        (each / "__init__.py").touch()
    (hooks / "torch_hooks.py").write_text(
        "import os\nfrom pathlib import Path\n\n\ndef watch(folder):\n"
        '    with (Path(folder) / f"watched-{os.getpid()}").open("x"):\n        pass\n',
        encoding="utf-8",
    )
    it = Command(folder, tmp_path)
    it.write("site/torch/__init__.py", "class Thing:\n    pass\n")
    it.write("site/torch/nn.py", "")
    it.write("train.py", "import torch\nprint('trained', __name__)\n")
    it.write("runs.py", "import runpy\nrunpy.run_path('train.py', run_name='__main__')\n")
    return it


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("train.py",), id="a file"),
        pytest.param(("-m", "train"), id="a module"),
        pytest.param(("runs.py",), id="runpy"),
        pytest.param(("-c", "import torch.nn"), id="a part of it first"),
        pytest.param(("-c", "import importlib; importlib.reload(__import__('torch'))"), id="imported again"),
        pytest.param(
            ("-c", "import subprocess, sys; subprocess.run([sys.executable, 'train.py'], check=True)"), id="in a child"
        ),
        pytest.param(
            ("-c", "import multiprocessing as m, train; p = m.get_context('fork').Process(); p.start(); p.join()"),
            id="and a fork",
        ),
        pytest.param(
            ("-c", "import threading as t; t.Thread(target=__import__, args=['torch']).start()"), id="a thread"
        ),
    ],
)
def test_hooks_come_once_into_what_imports_torch(command: Command, words: tuple[str, ...]) -> None:
    command.run(*words)
    assert command.num_watched == 1


def test_hooks_stay_out_of_what_does_not_train(command: Command) -> None:
    command.run("-c", "import importlib.util; importlib.util.find_spec('torch'); import json")
    assert command.num_watched == 0
    assert not list(command.folder.glob("failure-*"))


def test_hooks_come_where_torch_is_found_at_the_second_try_only(command: Command) -> None:
    script = command.write(
        "late.py",
        "import sys\nsite = next(path for path in sys.path if path.endswith('site'))\nsys.path.remove(site)\n"
        "try:\n    import torch\nexcept ImportError:\n    sys.path.append(site)\nimport torch\n",
    )
    command.run(script)
    assert command.num_watched == 1


def test_nothing_of_torch_shows_that_hooks_have_come(command: Command) -> None:
    asked = command.write("asked.py", ASKED)
    assert command.run(asked) == command.run(asked, hooked=False)
    assert command.num_watched == 1


def test_the_users_own_start_file_runs_and_may_import_torch(command: Command, golden: Golden) -> None:
    command.write("mine/sitecustomize.py", "import torch\nprint('mine', __name__)\n")
    golden(command.run("train.py", path=str(command.work / "mine")))
    assert command.num_watched == 1
    # One that fails is said, and nothing else is wrong: as Python's own site does.
    command.write("mine/sitecustomize.py", "raise KeyError('mine')\n")
    assert command.run("train.py", path=str(command.work / "mine")) == "trained __main__\n"


def test_a_wrapper_may_prepend_to_the_path(command: Command) -> None:
    wrapper = command.write(
        "wrap.py",
        "import os, subprocess, sys\nos.environ['PYTHONPATH'] = 'lib' + os.pathsep + os.environ['PYTHONPATH']\n"
        "subprocess.run([sys.executable, 'train.py'], check=True)\n",
    )
    command.run(wrapper)
    assert command.num_watched == 1


@pytest.mark.parametrize("word", ["-I", "-E", "-S"])
def test_a_python_that_reads_no_variables_is_not_watched_and_left_as_it_is(command: Command, word: str) -> None:
    command.run(word, "-c", "import sys; sys.path.append('site'); import torch")
    assert command.num_watched == 0
    assert not list(command.folder.glob("failure-*"))


def test_hooks_that_cannot_be_imported_leave_the_training_alone_and_say_why(command: Command, golden: Golden) -> None:
    hooks = command.folder / "package" / "pytest_llmperf" / "worker" / "script" / "torch_hooks.py"
    hooks.write_text("import msgspec_that_is_not_there", encoding="utf-8")
    assert command.run("train.py") == "trained __main__\n"
    failure = json.loads((command.folder / "failure-0.json").read_text(encoding="utf-8"))
    golden(failure["message"])
