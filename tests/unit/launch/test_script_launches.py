"""A user's own command as a launch, without torch: what is refused, what is set, and how each failure is told."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pytest_llmperf.launch import outcome
from pytest_llmperf.launch.device import Gpu
from pytest_llmperf.launch.local import LocalLauncher
from pytest_llmperf.launch.process import Ended
from pytest_llmperf.launch.request import LaunchRequest, worker_environment
from pytest_llmperf.launch.script import ScriptLaunch, announced
from pytest_llmperf.records.failure import Failure, Progress
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.ranks import Share, Trained
from pytest_llmperf.settings.setting import SpecError
from pytest_llmperf.settings.spec import ScriptSpec
from pytest_llmperf.support import codec
from tests.fakes import launch_of
from tests.golden import Golden

GPU = Gpu(0, "GPU-0aaa", "NVIDIA H100", 80 * 10**9)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "train.py").touch()
    return tmp_path / "project"


def request_of(project: Path, command: str, **fields: Any) -> LaunchRequest:
    given = {name: fields.pop(name) for name in ("python", "variables") if name in fields}
    spec = ScriptSpec(command=command, **{"steps": 6, "warmup_steps": 2, **fields})
    folder = project.with_name("launch")
    return LaunchRequest(spec=spec, folder=folder, gpus=(), timeout_seconds=60.0, root=project, **given)


def launched(project: Path, command: str, **fields: Any) -> Failure:
    failure = LocalLauncher().launch(request_of(project, command, **fields), lambda _: None)
    assert isinstance(failure, Failure)
    return failure


@pytest.mark.parametrize(
    ("command", "fields"),
    [
        ("nosuchprogram train.py", {"env": {"PATH": "/a:/b:/c:/d"}}),
        ("trian.py", {"env": {"PATH": "/a"}}),
        ("python other.py", {}),
        ("python trian.py", {}),
        ("python train.py", {"cwd": "elsewhere"}),
        ("./train.py", {}),
    ],
    ids=[
        "no program",
        "a program by another name",
        "no script",
        "a script by another name",
        "no folder",
        "no program's rights",
    ],
)
def test_what_is_not_there_is_told_before_anything_starts(
    project: Path, command: str, fields: dict[str, Any], golden: Golden
) -> None:
    failure = launched(project, command, **fields)
    golden(failure.reason.replace(str(Path(sys.executable).parent), "<programs>"))
    assert not (project.with_name("launch") / "torchrun.log").exists()
    assert not [path for path in project.with_name("launch").rglob("*") if path.is_symlink()]


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        ("bash -c 'nosuchprogram train.py'", "never-started"),
        ("bash -c 'echo loading; exit 3'", "never-started"),
        ("bash -c 'kill -SEGV $$'", "never-started"),
        ("bash -c 'echo RuntimeError: CUDA out of memory. Tried to allocate 2 GiB; exit 1'", "oom"),
        ("bash -c 'echo cannot reach the Hub: offline mode is enabled; exit 1'", "never-started"),
        (f"{sys.executable} -I -c pass", "error"),
        (f"{sys.executable} -I -c 'raise ValueError(7)'", "never-started"),
        (f"{sys.executable} -c pass", "error"),
    ],
    ids=["no program", "exit code", "signal", "memory", "offline", "no hook", "no hook, and it raised", "no torch"],
)
def test_a_command_that_ended_by_itself_says_why(project: Path, command: str, kind: str, golden: Golden) -> None:
    failure = launched(project, command)
    golden(failure.message)
    assert failure.kind == kind


def test_a_python_that_cannot_have_the_hook_is_told_of(project: Path, golden: Golden) -> None:
    (project / "torch.py").touch()  # none that could be hooked
    (project / "train.py").write_text("import torch")
    failure = launched(project, f"{sys.executable} train.py")
    assert failure.kind == "refused"
    golden(failure.message)


LOG = """\
python: can't open file '/x/t.py': [Errno 2] No such file or directory
E1125 17:42:11.5 71 site-packages/torch/distributed/elastic/multiprocessing/api.py:1010] failed (exitcode: 2)
============================================================
"""


@pytest.mark.parametrize("seen", ["", "hook", "torch", "rank"])
@pytest.mark.parametrize(("step", "ended"), [(0, "timeout"), (0, "code"), (4, "code")])
def test_what_was_seen_of_a_training_is_told(tmp_path: Path, seen: str, step: int, ended: str, golden: Golden) -> None:
    if seen:
        (tmp_path / "seen-71").write_text("torch" if seen == "rank" else seen)
    if seen == "rank":
        (tmp_path / "rank-0.pid").write_text("71")
    (tmp_path / "torchrun.log").write_text(LOG if ended == "code" and seen != "hook" else "")
    how = Ended(1, timed_out=ended == "timeout", seconds=300.0)
    progress = Progress(phase="training" if step else "starting", step=step, steps=6 if step else 0)
    failure = outcome.read(tmp_path, ScriptSpec(command="python t.py"), how, progress)
    assert isinstance(failure, Failure)
    golden(failure.message)


def share(
    script: ScriptLaunch,
    rank: int,
    *,
    world: int = 1,
    device: str = "",
    found: tuple[float, ...] = (),
    **evidence: Any,
) -> None:
    """What ``rank`` leaves; ``found``: its losses."""
    made = launch_of(script.spec)
    record = replace(made.ranks[0], rank=rank, device=device or "a CPU")
    evidence = {"tokens": "unknown", **evidence}
    trained = Trained(record=record, losses=found, train_seconds=1.0, parameters=9, evidence=evidence)
    values = codec.plain(Share(world=world, trained=trained, trace=made.trace, loaded={}))
    (script.folder / f"share-{rank}.json").write_text(json.dumps(values))
    (script.folder / "environment.json").write_text(json.dumps(codec.plain(made.environment)))


def started(project: Path, command: str = "python train.py", **fields: Any) -> ScriptLaunch:
    request = request_of(project, command, **fields)
    request.folder.mkdir()
    script = ScriptLaunch.of(request)
    assert script is not None
    return script


KILLED = Ended(-9, timed_out=False, seconds=9.0)


def test_a_launch_is_over_once_every_rank_has_left_its_share(project: Path) -> None:
    script = started(project, gpus=2)
    assert not script.is_over()
    share(script, 0, world=2)
    assert not script.is_over()
    share(script, 1, world=2)
    assert script.is_over()
    recorded = script.recorded(KILLED, ())
    assert recorded.returncode == 0
    assert isinstance(outcome.read(script.folder, script.spec, recorded, Progress(phase="finishing")), Launch)


def test_a_launch_that_runs_to_its_own_end_is_not_ended(project: Path) -> None:
    script = started(project, end="script")
    share(script, 0)
    assert not script.is_over()
    reason = script.folder / "failure-0.json"
    reason.touch()
    assert not script.is_over(), "its launcher may have more to tell"
    os.utime(reason, (0, time.time() - 4))
    assert script.is_over()


@pytest.mark.parametrize("ended", [Ended(4, timed_out=False, seconds=9.0), Ended(-9, timed_out=True, seconds=9.0)])
def test_how_a_script_ended_after_its_record_is_a_remark(project: Path, ended: Ended, golden: Golden) -> None:
    script = started(project, end="script")
    share(script, 0)
    record = outcome.read(script.folder, script.spec, script.recorded(ended, ()), Progress(phase="finishing"))
    assert isinstance(record, Launch)
    golden(record.evidence["remarks"])


@pytest.mark.parametrize(
    ("gpus", "words", "device", "leased"),
    [
        (2, "", "", ()),
        (2, "--num_processes 2 ", "", ()),
        (1, "", "NVIDIA H100 1bbb", (GPU,)),
        (1, "", "NVIDIA H100 1bbb", ()),
    ],
    ids=["fewer ranks", "fewer than its launcher was told", "another GPU", "a GPU where the CPU was meant"],
)
def test_a_record_of_something_else_is_refused(
    project: Path, gpus: int, words: str, device: str, leased: tuple[Gpu, ...], golden: Golden
) -> None:
    script = started(project, f"accelerate launch {words}train.py", gpus=gpus)
    share(script, 0, device=device, device_type="cuda" if device else "cpu")
    ended = script.recorded(KILLED, leased)
    failure = outcome.read(script.folder, script.spec, ended, Progress(phase="finishing"))
    assert isinstance(failure, Failure)
    assert failure.kind == "refused"
    golden(failure.message)


def test_ranks_on_their_own_gpus_are_as_asked(project: Path) -> None:
    script = started(project)
    share(script, 0, device="NVIDIA H100 0aaa", device_type="cuda")
    assert script.recorded(KILLED, (GPU,)).returncode == 0


def test_losses_of_a_pipeline_are_those_of_its_last_stage(project: Path) -> None:
    script = started(project, gpus=2)
    share(script, 0, world=2, losses="unknown")
    share(script, 1, world=2, found=(3.0, 2.0))
    record = outcome.read(script.folder, script.spec, script.recorded(KILLED, ()), Progress(phase="finishing"))
    assert isinstance(record, Launch)
    assert record.losses == (3.0, 2.0)
    assert "losses" not in record.evidence


def test_a_rank_without_tokens_is_one_of_a_script_whose_tokens_nobody_knows(project: Path) -> None:
    script = started(project, gpus=2)
    share(script, 0, world=2, tokens="counted")
    share(script, 1, world=2)
    record = outcome.read(script.folder, script.spec, script.recorded(KILLED, ()), Progress(phase="finishing"))
    assert isinstance(record, Launch)
    assert [rank.tokens_per_step for rank in record.ranks] == [1, 1]
    assert record.evidence["tokens"] == "unknown"


class TestSpec:
    @pytest.mark.parametrize(
        "words",
        [
            {"seed": "abc"},
            {"env": {"A": 1}},
            {"gpus": -1},
            {"gpus": "2"},
            {"name": 5},
            {"name": "x" * 200},
            {"cwd": None},
            {"command": "PYTHONPATH=src python train.py"},
            {"command": "python train.py --token hf_abcdefghijklmnopqrst"},
            {"tiny": "python train.py --data https://me:secret@host/d"},
        ],
        ids=str,
    )
    def test_what_cannot_work_is_refused(self, words: dict[str, Any], golden: Golden) -> None:
        with pytest.raises(SpecError) as raised:
            ScriptSpec(**{"command": "python train.py", **words})
        golden(str(raised.value).replace("x" * 200, "..."))

    def test_a_token_of_a_tokenizer_is_no_secret(self) -> None:
        assert ScriptSpec(command="python train.py --pad_token '</s>' --sort-key length --max_tokens=4096").gpus == 1

    @pytest.mark.parametrize(
        ("command", "gpus"),
        [
            ("python train.py --num-gpus 8", 1),
            ("python -m pkg.train --num-processes 8", 1),
            ("torchrun --nproc-per-node 2 train.py --num-gpus 8", 2),
            ("accelerate launch --num_processes=4 -m pkg.train", 4),
            ("python -m torch.distributed.run --nproc-per-node 2 entry", 2),
            ("deepspeed --num_gpus 2 train.py", 2),
        ],
    )
    def test_the_script_s_own_words_start_no_ranks(self, command: str, gpus: int) -> None:
        assert ScriptSpec(command=command).gpus == gpus

    def test_one_file_to_watch(self) -> None:
        assert ScriptSpec(command="python train.py", watch="a.yaml").watch == ("a.yaml",)

    def test_a_search_has_one_name_wherever_it_begins(self) -> None:
        long = ScriptSpec(command=f"python train.py {'x' * 90} {{micro_batch_size}}", micro_batch_size=2)
        assert long.capacity_id == long.changed(micro_batch_size=3).capacity_id

    def test_long_words_and_choices_are_left_as_they_are(self, project: Path) -> None:
        (project / "fast").touch()
        (project / "a.yaml").touch()
        script = started(project, f"python train.py --mode fast --config a.yaml {'x/' * 3000}")
        assert script.command[1:] == [
            str(project / "train.py"), "--mode", "fast", "--config", str(project / "a.yaml"), "x/" * 3000
        ]  # fmt: skip


class TestEnvironment:
    def test_a_script_has_its_own_threads_and_sends_nothing(
        self, project: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("OMP_NUM_THREADS", "TOKENIZERS_PARALLELISM"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("WANDB_MODE", "online")
        monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://of.everybody")
        request = request_of(project, "python train.py", env={"NEPTUNE_MODE": "async"})
        request.folder.mkdir()
        script = ScriptLaunch.of(request)
        assert script is not None
        found = script.environment(worker_environment(request, os.environ))
        assert (found["WANDB_MODE"], found["NEPTUNE_MODE"], found["HF_HUB_OFFLINE"]) == ("offline", "async", "1")
        assert not {"OMP_NUM_THREADS", "MLFLOW_TRACKING_URI", "TOKENIZERS_PARALLELISM"} & {*found}

    def test_the_shell_may_let_a_launch_reach_the_hub(self, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        assert started(project).variables["HF_HUB_OFFLINE"] == "0"

    def test_paths_of_the_user_come_after_ours(self, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PYTHONPATH", "/of/the/shell")
        request = replace(request_of(project, "python train.py"), variables={"PYTHONPATH": "/another/revision"})
        request.folder.mkdir()
        script = ScriptLaunch.of(request)
        assert script is not None
        assert script.variables["PYTHONPATH"].endswith(f"script/path{os.pathsep}/another/revision")

    def test_another_python_comes_first(self, project: Path) -> None:
        request = request_of(project, "python train.py", python="/other/bin/python")
        request.folder.mkdir()
        script = ScriptLaunch.of(request)
        assert script is not None
        assert script.environment({"PATH": "/usr/bin"})["PATH"] == "/other/bin:/usr/bin"


class TestSideEffects:
    def said(self, project: Path, during: str = "", **fields: Any) -> list[str]:
        request, lines, said = request_of(project, "python train.py", **fields), list[str](), set[str]()
        for _ in range(2):  # the second launch of it says nothing anew
            with announced(request, lines.append, said):
                if during:
                    path = project / during
                    path.parent.mkdir(exist_ok=True, parents=True)
                    time.sleep(0.02)  # a file system's clock is coarser
                    path.touch()
        return lines

    def test_what_is_set_is_said_once_without_secrets(
        self, project: Path, monkeypatch: pytest.MonkeyPatch, golden: Golden
    ) -> None:
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        monkeypatch.setenv("TRACKIO_SPACE_ID", "mine")
        golden(self.said(project, env={"MODE": "a b"}, variables={"API_KEY": "sk-0123456789"}))

    def test_a_secret_is_no_part_of_a_case(self, golden: Golden) -> None:
        with pytest.raises(SpecError) as raised:
            ScriptSpec(command="python train.py", env={"API_KEY": "sk-0123456789"})
        golden(raised)

    def test_what_it_wrote_among_the_users_files_is_said(self, project: Path, golden: Golden) -> None:
        lines = self.said(project, "out/checkpoint-5/model.pt", workdir="own")
        golden(lines[1])

    @pytest.mark.parametrize("path", ["__pycache__/train.pyc", ".git/index", ".llmperf/run/launch.json"])
    def test_what_tools_write_is_not(self, project: Path, path: str) -> None:
        assert len(self.said(project, path)) == 1


def test_the_users_files_are_shown_and_never_removed(project: Path) -> None:
    (project / "checkpoint-5").mkdir()
    (project / "checkpoint-5" / "model.pt").touch()
    script = started(project)
    assert (script.work / "checkpoint-5" / "model.pt").exists()
    share(script, 0)
    ended = script.closed(KILLED, ())
    outcome.read(script.folder, script.spec, ended, Progress(phase="finishing"))
    assert not script.work.exists()
    assert (project / "checkpoint-5" / "model.pt").exists()


def test_a_launch_within_the_users_folder_is_not_shown_to_itself(project: Path) -> None:
    request = replace(request_of(project, "python train.py"), folder=project / ".llmperf" / "run" / "case-1")
    request.folder.mkdir(parents=True)
    script = ScriptLaunch.of(request)
    assert script is not None
    assert [path.name for path in script.work.iterdir()] == ["train.py"]


def test_what_a_failed_launch_made_is_kept_without_links(project: Path) -> None:
    script = started(project)
    (script.work / "out").mkdir()
    script.closed(Ended(1, timed_out=False, seconds=1.0), ())
    assert [path.name for path in script.work.iterdir()] == ["out"]
    assert not [*(script.folder / "package").iterdir()]
