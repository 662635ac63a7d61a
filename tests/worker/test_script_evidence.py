"""What is known of a user's own training, and where it waits: one script of several files, launched twice."""

# ruff: noqa: PLC0415 - torch may not be here

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pytest_llmperf import ScriptSpec
from pytest_llmperf.launch.local import LocalLauncher
from pytest_llmperf.launch.request import LaunchRequest
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.steady_state import MOST_GROWTH
from pytest_llmperf.records.trace import LEFT
from pytest_llmperf.support import codec
from tests.worker.user import QUICK

torch = pytest.importorskip("torch")

from pytest_llmperf.observe.environment import parameter_groups  # noqa: E402 - it imports torch
from pytest_llmperf.worker.script.model import _identity  # noqa: E402 - it imports torch

pytestmark = pytest.mark.torchrun

TRAIN = """
import torch
from parts.model import Model

torch.manual_seed(0)
model = Model()
model.embed.weight.requires_grad_(False)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
while True:
    tokens = torch.randint(100, (4, 32))
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(tokens)
    loss = torch.nn.functional.cross_entropy(logits.float().view(-1, 100), tokens.view(-1))
    loss.backward()
    for _ in range(3):
        loss.item()
    optimizer.step()
    optimizer.zero_grad()
"""
MODEL = """
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(100, 16)
        self.dropout = nn.Dropout(0.1)
        self.head = checkpoint_wrapper(nn.Linear(16, 100))

    def forward(self, tokens):
        return self.head(self.dropout(self.embed(tokens)))
"""


def launched(project: Path, folder: Path) -> Launch:
    spec = ScriptSpec(
        command="python scripts/train.py",
        steps=8,
        watch=["config/*.yaml", "lost.yaml"],
        env={"PYTHONPATH": f"{QUICK}:{project}", "SIZE": "3"},
    )
    request = LaunchRequest(spec=spec, folder=folder, gpus=(), root=project, timeout_seconds=240)
    launch = LocalLauncher().launch(request, lambda _: None)
    assert isinstance(launch, Launch), launch
    return launch


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    files = {"scripts/train.py": TRAIN, "parts/model.py": MODEL, "parts/unused.py": "", "config/a.yaml": "size: 3"}
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def launches(project: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Launch]:
    return [launched(project, tmp_path_factory.mktemp("out") / "launch") for _ in range(2)]


def evidence(launches: list[Launch]) -> dict[str, Any]:
    return dict(launches[0].evidence)


def test_two_launches_of_one_script_have_the_same_evidence(launches: list[Launch]) -> None:
    one, other = (json.dumps(codec.plain(dict(launch.evidence)), sort_keys=True, indent=1) for launch in launches)
    assert one == other
    assert "uncollected" not in one


def test_no_folder_of_this_machine_is_in_it(launches: list[Launch], project: Path) -> None:
    told = {name: value for name, value in evidence(launches).items() if name != "env"}
    assert str(project.parent) not in json.dumps(codec.plain(told))


def test_the_projects_own_files_have_digests(launches: list[Launch]) -> None:
    assert list(evidence(launches)["setup"]["sources"]) == ["config/a.yaml", "parts/model.py", "scripts/train.py"]
    assert evidence(launches)["remarks"] == [
        "watch='lost.yaml' is no file of the command's folder; expected a path as seen from there"
    ]


def test_what_was_active_is_read_off_its_objects(launches: list[Launch]) -> None:
    seen = evidence(launches)
    assert seen["setup"]["roots"] == ["parts.model.Model"]
    assert seen["setup"]["dropout"] == {"Dropout.p": "0.1 x1"}
    assert seen["setup"]["trained_share"] == round(1700 / 3300, 6)
    assert seen["setup"]["parameter_groups"] == ["3 lr=0.001 weight_decay=0.01"]
    expected = {
        "autocast_dtype": "torch.bfloat16",
        "parameter_dtypes": {"torch.float32": 3300},
        "gradient_checkpointing": True,
        "optimizer": "AdamW",
        "torch_compile": False,
        "parallelism": "none",
        "tokens": "counted",
        "command": "python scripts/train.py",
    }
    assert {name: seen[name] for name in expected} == expected
    assert "attention" not in seen


def test_what_watches_is_no_part_of_it(launches: list[Launch]) -> None:
    setup = evidence(launches)["setup"]
    assert setup["hooks"] == {}
    assert setup["overhead"]["optimizer_hooks"] == 0
    assert "pytest_llmperf" not in str(setup["step"])


def test_what_the_user_sets_for_the_command_is_kept(launches: list[Launch]) -> None:
    assert evidence(launches)["env"]["SIZE"] == "3"


def test_the_lines_that_wait_are_all_that_wait(launches: list[Launch]) -> None:
    places = launches[0].trace.places["wait"]
    assert places == {"scripts/train.py:16 loss.item()": 3.0, "scripts/train.py:17 optimizer.step()": 2.0}
    assert launches[0].trace.count("synchronisations_per_step") == sum(places.values())
    assert launches[0].trace.counts == launches[1].trace.counts


@pytest.fixture
def mesh() -> Iterator[Any]:
    """Of four ranks, of which there is one; none answers."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    torch.distributed.destroy_process_group()


def test_what_weights_are_spread_over_is_named(mesh: Any) -> None:
    from torch import nn
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    from pytest_llmperf.worker.script.model import _parallelism

    def found(*, fsdp: bool, tensor: bool) -> Any:
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        if tensor:
            parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
        if fsdp:
            fully_shard(model, mesh=mesh["dp_shard"])
        return _parallelism(model, 4)["parallelism"]

    assert found(fsdp=False, tensor=False) == "none"
    assert found(fsdp=True, tensor=False) == "fsdp"
    assert found(fsdp=False, tensor=True) == "tp 2"
    assert found(fsdp=True, tensor=True) == "fsdp tp 2"


LEAKS = """
import torch

torch.manual_seed(0)
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
history = []
while True:
    loss = model(torch.randn(8, 64)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    history.append(loss.new_ones(2**16))
"""


def test_what_a_leaking_script_keeps_is_named_by_its_variable(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LEAKS)
    spec = ScriptSpec(command="python train.py", steps=24, env={"PYTHONPATH": str(QUICK)})
    request = LaunchRequest(spec=spec, folder=tmp_path / "run", gpus=(), root=tmp_path, timeout_seconds=240)
    launch = LocalLauncher().launch(request, lambda _: None)
    assert isinstance(launch, Launch), launch
    assert launch.trace is not None
    assert launch.trace.places[LEFT] == {"Tensor in 'history' of train.py": 1.0}
    assert launch.allocated_growth is not None
    assert launch.allocated_growth > MOST_GROWTH


def test_other_cells_of_one_tensor_are_another_batch() -> None:
    rows = torch.arange(16).view(4, 4)
    assert _identity(rows[:, :2]) == _identity(rows[:, :2])
    assert _identity(rows[:, :2]) != _identity(rows[:2])
    assert _identity(rows[:2]) != _identity(rows[::2])


def test_a_schedule_is_no_other_learning_rate() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    before = parameter_groups(optimizer)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=10)
    optimizer.step()
    schedule.step()
    assert optimizer.param_groups[0]["lr"] < 0.5
    assert parameter_groups(optimizer) == before == ["1 lr=0.5 weight_decay=0"]
