"""The lines of Python that ask for a tensor's content, or copy it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.profiler import ProfilerActivity, profile  # noqa: E402

from pytest_llmperf.observe.environment import Project  # noqa: E402
from pytest_llmperf.observe.places import Places  # noqa: E402
from pytest_llmperf.observe.tracer import TRACED_STEPS, Tracer  # noqa: E402

CPU = torch.device("cpu")


def users(tmp_path: Path, code: str, name: str = "train.py") -> Callable[..., Any]:
    """The function ``step`` of a user's file, whose module has the file's name."""
    file = tmp_path / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(code, encoding="utf-8")
    space: dict[str, Any] = {"__name__": file.stem, "torch": torch}
    exec(compile(code, str(file), "exec"), space)
    step: Callable[..., Any] = space["step"]
    return step


def seen(step: Callable[..., Any], folder: Path) -> dict[str, dict[str, float]]:
    places = Places(CPU, Project(folder))
    places.begin()
    try:
        step()
    finally:
        places.end()
    return places.found()


def test_what_asks_for_a_tensors_content_has_the_line_that_asks(tmp_path: Path) -> None:
    code = """def step():
    loss = torch.ones(1)
    for _ in range(3):
        loss.item()
    if loss > 0:
        float(loss), int(loss), loss.tolist(), loss.numpy()
"""
    assert seen(users(tmp_path, code), tmp_path) == {
        "wait": {
            "train.py:6 float(loss), int(loss), loss.tolist(), loss.numpy()": 4.0,
            "train.py:4 loss.item()": 3.0,
            "train.py:5 if loss > 0:": 1.0,
        }
    }


def test_what_a_script_does_in_some_traced_steps_alone_has_its_line_and_ours_are_alike(tmp_path: Path) -> None:
    step = users(tmp_path, "def step(number):\n    if number == 0:\n        torch.ones(1).item()\n")
    found = {}
    for is_ours in (False, True):
        tracer = Tracer(CPU, is_ours=is_ours, project=Project(tmp_path))
        tracer.begin()
        for number in range(TRACED_STEPS):
            step(0 if is_ours else number)
            tracer.end_step()
        found[is_ours] = tracer.trace(None, (), 0).places
    place = "train.py:3 torch.ones(1).item()"
    script = {kind: places for kind, places in found[False].items() if kind != "host"}  # of which a clock tells
    assert script == {"wait": {place: 1 / TRACED_STEPS}, "operator": {place: 2 / TRACED_STEPS}}
    assert found[True] == {"wait": {place: 1.0}}


def test_a_script_s_calls_have_each_line_that_led_to_them_and_its_time_the_line_that_waits(tmp_path: Path) -> None:
    code = """import time


def layer(x):
    return torch.relu(x + 1)


def step():
    x = torch.ones(2)
    assert x.shape
    layer(x)
    layer(x)
    time.sleep(0.1)
"""
    places = Places(CPU, Project(tmp_path), looks_on=True)
    step = users(tmp_path, code)
    places.begin()
    step()
    places.end()
    found = places.found()
    assert found["operator"] == {
        "train.py:5 return torch.relu(x + 1)": 4.0,
        "train.py:9 x = torch.ones(2)": 1.0,
        "train.py:11 layer(x)": 2.0,
        "train.py:12 layer(x)": 2.0,
    }
    assert found["host"]["train.py:13 time.sleep(0.1)"] > 0.03


def test_a_script_computes_the_same_while_its_lines_are_looked_for(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(8, 2, 8, batch_first=True).eval()  # it asks whether anybody stands between

    def operators(*, looks_on: bool) -> list[str]:
        places = Places(CPU, Project(tmp_path), looks_on=looks_on)
        places.begin()
        with profile(activities=[ProfilerActivity.CPU]) as profiler, torch.no_grad():
            layer(torch.ones(1, 2, 8))
        places.end()
        return sorted(event.name for event in profiler.events() or [])

    assert operators(looks_on=True) == operators(looks_on=False)


def test_nobody_looks_at_a_run_in_production_nor_among_modes_of_the_script_s_own(tmp_path: Path) -> None:
    code = "import threading\n\ndef step():\n    torch.ones(1).add(1)\n    return threading.enumerate()\n"
    step = users(tmp_path, code)
    tracer = Tracer(CPU, is_ours=False)
    tracer.begin()
    assert not [thread for thread in step() if thread.name == "llmperf-places"]
    with torch.device("cpu"):
        places = Places(CPU, Project(tmp_path), looks_on=True)
        places.begin()
        assert [thread for thread in step() if thread.name == "llmperf-places"]
        places.end()
    assert "operator" not in places.found()
    assert not [thread for thread in step() if thread.name == "llmperf-places"]


def test_what_torch_asks_for_has_the_projects_line_that_called_it(tmp_path: Path) -> None:
    code = """def step():
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    torch.optim.AdamW([parameter]).step()
"""
    assert seen(users(tmp_path, code), tmp_path)["wait"] == {"train.py:4 torch.optim.AdamW([parameter]).step()": 1.0}


def test_a_copy_is_another_tensor_of_the_same_content(tmp_path: Path) -> None:
    code = """def step():
    one = torch.ones(2)
    one.float()
    one.double()
    one.contiguous()
    one.copy_(torch.zeros(2))
"""
    expected = {"train.py:4 one.double()": 1.0, "train.py:6 one.copy_(torch.zeros(2))": 1.0}
    assert seen(users(tmp_path, code), tmp_path)["copy"] == expected


def test_a_package_that_the_projects_line_led_to_is_named_beside_it(tmp_path: Path) -> None:
    inner = users(tmp_path, "def step():\n    torch.ones(1).item()\n", "env/site-packages/stepper/loop.py")
    outer = users(tmp_path, "def step(train):\n    train()\n")
    found = seen(lambda: outer(inner), tmp_path)
    assert found == {"wait": {"train.py:2 train() => stepper/loop.py:2 torch.ones(1).item()": 1.0}}


def test_what_the_project_asks_for_itself_is_kept_beside_a_package_that_asks_in_many_places(tmp_path: Path) -> None:
    lines = "\n".join("    loss.item() and loss.item()" for _ in range(80))
    package = users(tmp_path, f"def step():\n    loss = torch.ones(1)\n{lines}\n", "site-packages/noisy/metrics.py")
    step = users(tmp_path, "def step():\n    log()\n    torch.ones(1).item()\n")
    step.__globals__["log"] = package
    found = seen(step, tmp_path)["wait"]
    assert next(iter(found)) == "train.py:3 torch.ones(1).item()"
    assert 20 < len(found) < 80


def test_a_package_is_named_from_its_own_folder_on(tmp_path: Path) -> None:
    step = users(tmp_path, "def step():\n    torch.ones(1).item()\n", "env/site-packages/stepper/loop.py")
    # The test itself is of another repository than the user's.
    assert seen(step, tmp_path) == {"wait": {"stepper/loop.py:2 torch.ones(1).item()": 1.0}}


def test_all_is_as_before_once_a_step_is_over(tmp_path: Path) -> None:
    before, show = dict(vars(torch.Tensor)), warnings.showwarning
    seen(users(tmp_path, "def step():\n    torch.ones(1).item()\n"), tmp_path)
    assert dict(vars(torch.Tensor)) == before
    assert warnings.showwarning is show


def test_no_operator_is_added_to_what_is_traced(tmp_path: Path) -> None:
    code = """def step():
    weight = torch.ones(8, 8, requires_grad=True)
    loss = (weight.double() @ torch.ones(8, 8).double()).sum()
    loss.backward()
    for _ in range(4):
        loss.item(), bool(loss), loss.tolist()
"""
    step = users(tmp_path, code)

    def names(run: Callable[[], object]) -> list[str]:
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            run()
        return sorted(event.name() for event in profiled.profiler.kineto_results.events() if "::" in event.name())

    alone = names(step)
    assert len(alone) > 20
    assert names(lambda: seen(step, tmp_path)) == alone


def test_a_file_of_the_repository_outside_the_commands_folder_is_the_projects(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    project = Project(tmp_path / "examples")
    assert project.name_of(str(tmp_path / "examples" / "train.py")) == "train.py"
    assert project.name_of(str(tmp_path / "library" / "loss.py")) == "../library/loss.py"
    assert project.name_of(str(tmp_path / ".venv/lib/site-packages/trl/trainer.py")) == ""
    assert project.name_of(torch.__file__) == ""
    assert project.name_of("<string>") == ""
    (tmp_path / "library").mkdir()
    (tmp_path / "library" / "linked.py").symlink_to(torch.__file__)
    assert project.name_of(str(tmp_path / "library" / "linked.py")) == "", "a link is what it leads to"


def test_of_a_gpu_each_warning_of_a_wait_and_each_wait_by_hand_has_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    modes = ["default"]
    monkeypatch.setattr("torch.cuda.get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr("torch.cuda.set_sync_debug_mode", modes.append)
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    code = """import warnings
def waits():
    warnings.warn("called a synchronizing CUDA operation")
def step():
    for _ in range(3):
        waits()
    torch.cuda.synchronize()
    warnings.warn("the user's own")
"""
    places = Places(torch.device("cuda"), Project(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("default", message="the user's own")
        places.begin()
        users(tmp_path, code)()
        places.end()
    text = 'warnings.warn("called a synchronizing CUDA operation")'
    assert places.found() == {"wait": {f"train.py:3 {text}": 3.0, "train.py:7 torch.cuda.synchronize()": 1.0}}
    assert [str(each.message) for each in recwarn] == ["the user's own"]
    assert modes == ["default", "warn", "default"]
