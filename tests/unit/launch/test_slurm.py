"""The SLURM launcher without SLURM: its commands are scripts that do what a plan says."""

from __future__ import annotations

import itertools
import json
import os
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_llmperf import TrainSpec
from pytest_llmperf.launch.fork_servers import ServerPool
from pytest_llmperf.launch.process import Ended, package_path
from pytest_llmperf.launch.request import LaunchRequest, WarmStart
from pytest_llmperf.launch.site import OutOfTimeError, SlurmOptions
from pytest_llmperf.launch.slurm import slurm_site as slurm_module
from pytest_llmperf.launch.slurm import step_outcome
from pytest_llmperf.launch.slurm.cluster import Srun, find_cluster, passed_on
from pytest_llmperf.launch.slurm.controller import (
    Allocation,
    AllocationError,
    expand_nodes,
    job_key,
    place,
    step_environment,
)
from pytest_llmperf.launch.slurm.node import server_key
from pytest_llmperf.launch.slurm.node_servers import NodeServers
from pytest_llmperf.launch.slurm.slurm_site import SlurmLauncher
from pytest_llmperf.launch.watch import ProgressReader
from pytest_llmperf.records.calibration import Health
from pytest_llmperf.records.failure import Failure, Progress
from pytest_llmperf.records.launch import Launch
from tests.golden import Golden
from tests.slurm.agents import agents
from tests.slurm.fakes import FakeSlurm

pytestmark = pytest.mark.processes

SPEC = TrainSpec(model="llama-tiny", gpus=2, sequence_length=16)
GPUS: dict[str, object] = {"gpus": 4}


@pytest.fixture(scope="module")
def forked_agents() -> Iterator[str]:
    with agents() as address:
        yield address


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forked_agents: str) -> FakeSlurm:
    monkeypatch.setattr(step_outcome, "_LAST_WORDS_SECONDS", 0.5)
    return FakeSlurm(tmp_path, monkeypatch, forked_agents)


@pytest.fixture
def said() -> list[str]:
    return []


def launcher(slurm: FakeSlurm, said: list[str], *, on_cpu: bool = True, **options: object) -> SlurmLauncher:
    chosen = SlurmOptions(**{"python": str(slurm.python), **options})  # type: ignore[arg-type]
    cluster = find_cluster(chosen)
    return SlurmLauncher(Srun(cluster=cluster, options=chosen, on_cpu=on_cpu), say=said.append)


def options_of(slurm: FakeSlurm) -> SlurmOptions:
    return SlurmOptions(python=str(slurm.python))


def request(tmp_path: Path, spec: TrainSpec = SPEC, limit: float = 60.0) -> LaunchRequest:
    return LaunchRequest(spec=spec, folder=tmp_path / "run", gpus=(), timeout_seconds=limit)


class TestAllocation:
    @pytest.mark.parametrize(
        ("text", "names"),
        [
            ("n1", ["n1"]),
            ("n[1-2,05],m", ["n1", "n2", "n05", "m"]),
            ("gs06r[01-02]b[1,3]", ["gs06r01b1", "gs06r01b3", "gs06r02b1", "gs06r02b3"]),
            ("a[08-11]", ["a08", "a09", "a10", "a11"]),
        ],
    )
    def test_node_lists_expand_as_scontrol_does(self, text: str, names: list[str]) -> None:
        assert list(expand_nodes(text)) == names

    @pytest.mark.parametrize("text", ["", "n[1-", "n[a-b]", ","])
    def test_what_is_no_node_list_is_refused(self, text: str, golden: Golden) -> None:
        with pytest.raises(AllocationError) as raised:
            expand_nodes(text)
        golden(raised)

    def test_outside_of_a_job_there_is_none(self, golden: Golden) -> None:
        with pytest.raises(AllocationError) as raised:
            Allocation.from_variables({})
        golden(raised)

    def test_a_job_that_was_shrunk_has_fewer_variables(self) -> None:
        variables = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_CPUS_PER_NODE": "8(x2)"}
        assert Allocation.from_variables(variables).tasks_per_node == (8, 8)
        asked = {**variables, "SLURM_NTASKS_PER_NODE": "1"}
        assert Allocation.from_variables(asked).tasks_per_node == (1, 1), (
            "CPUs are no tasks where sbatch was asked for tasks"
        )
        assert Allocation.from_variables({**asked, "SLURM_TASKS_PER_NODE": "4(x2)"}).tasks_per_node == (4, 4)

    def test_stale_variables_are_refused(self, golden: Golden) -> None:
        variables = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n1", "SLURM_TASKS_PER_NODE": "4(x2)"}
        with pytest.raises(AllocationError) as raised:
            Allocation.from_variables(variables)
        golden(raised)

    def test_a_requeue_keeps_the_key_and_array_tasks_differ(self) -> None:
        array = {"SLURM_ARRAY_JOB_ID": "12", "SLURM_JOB_ID": "14"}
        assert job_key({"SLURM_JOB_ID": "3"}) == "3"
        assert [job_key({**array, "SLURM_ARRAY_TASK_ID": task}) for task in "18"] == ["12_1", "12_8"]

    @pytest.mark.parametrize(
        ("world", "per_node", "nodes", "placed"),
        [
            (1, 4, 8, (1, 1)),
            (4, 4, 8, (1, 4)),
            (8, 4, 8, (2, 4)),
            (6, 4, 8, (2, 3)),
            (32, 4, 8, (8, 4)),
            (5, 4, 5, (5, 1)),
        ],
    )
    def test_ranks_spread_evenly_over_the_fewest_nodes(
        self, world: int, per_node: int, nodes: int, placed: tuple[int, int]
    ) -> None:
        assert place(world, per_node, nodes) == placed[0]
        assert world // placed[0] == placed[1]

    @pytest.mark.parametrize(("world", "per_node", "nodes"), [(4, 3, 1), (64, 4, 8), (5, 4, 4)])
    def test_what_does_not_fit_is_told(self, world: int, per_node: int, nodes: int) -> None:
        assert place(world, per_node, nodes) is None


class TestCluster:
    def test_all_nodes_are_one_machine(self, slurm: FakeSlurm, said: list[str]) -> None:
        slurm.allocate({"n1": {**GPUS, "switch": "leaf1"}, "n2": GPUS})
        cluster = find_cluster(SlurmOptions(python=str(slurm.python)))
        cluster.check(on_cpu=False)
        assert [gpu.index for gpu in cluster.machine.gpus] == list(range(8))
        assert cluster.machine.gpu_kind == "h100-64gib"
        assert (cluster.gpus_per_node, cluster.cpus_per_node) == (4, 8)

    def test_a_missing_srun_is_told(self, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, golden: Golden) -> None:
        monkeypatch.setenv("PATH", "/nothing here")
        with pytest.raises(AllocationError) as raised:
            find_cluster(SlurmOptions())
        golden(raised)

    def test_what_the_node_said_is_told_and_not_that_its_task_ended(self, slurm: FakeSlurm, golden: Golden) -> None:
        ended = "srun: error: n1: task 0: Exited with exit code 2"
        slurm.allocate({"n1": {}}, srun_error=f"no such image\n{ended}")
        options = SlurmOptions(python=str(slurm.python), prefix=("singularity", "exec", "a.sif"))
        with pytest.raises(AllocationError) as raised:
            find_cluster(options)
        golden(raised)

    def test_an_option_that_srun_does_not_know_is_named(self, slurm: FakeSlurm, golden: Golden) -> None:
        unknown = "unrecognized option '--bogus'"
        slurm.allocate({"n1": {}}, srun_error=f'{unknown}\nTry "srun --help" for more information')
        with pytest.raises(AllocationError) as raised:
            find_cluster(SlurmOptions(python=str(slurm.python), srun=("--bogus",)))
        golden(raised)

    def test_no_answer_is_told_with_the_last_word_of_srun(self, slurm: FakeSlurm, golden: Golden) -> None:
        slurm.allocate({"n1": {}}, srun_error="Invalid job credential")
        with pytest.raises(AllocationError) as raised:
            find_cluster(SlurmOptions(python=str(slurm.python)))
        golden(raised)

    @pytest.mark.parametrize(
        ("second", "said"),
        [
            ({"gpus": 4, "gpu": "A100"}, r"n1: 4 × H100 64 GiB; n2: 4 × A100 64 GiB"),
            ({"gpus": 4, "gib": 80}, r"n1: 4 × H100 64 GiB; n2: 4 × H100 80 GiB"),
            ({"gpus": 3}, r"n1: 4 × H100 64 GiB; n2: 3 × H100 64 GiB"),
        ],
    )
    def test_nodes_that_differ_are_refused_and_named(
        self, slurm: FakeSlurm, second: dict[str, object], said: str, golden: Golden
    ) -> None:
        slurm.allocate({"n1": GPUS, "n2": second})
        with pytest.raises(AllocationError) as raised:
            find_cluster(SlurmOptions(python=str(slurm.python))).check(on_cpu=False)
        golden(raised)

    def test_a_dead_gpu_is_told_and_does_not_matter_on_the_cpu(self, slurm: FakeSlurm, golden: Golden) -> None:
        slurm.allocate({"n1": {"gpus": 3, "granted": 4}})
        cluster = find_cluster(SlurmOptions(python=str(slurm.python)))
        with pytest.raises(AllocationError) as raised:
            cluster.check(on_cpu=False)
        golden(raised)
        cluster.check(on_cpu=True)

    def test_a_job_that_asked_for_no_gpu_takes_nobody_elses(self, slurm: FakeSlurm, golden: Golden) -> None:
        slurm.allocate({"n1": {"gpus": 4, "granted": 0, "gres": "gpu:h100:4"}})
        cluster = find_cluster(SlurmOptions(python=str(slurm.python)))
        with pytest.raises(AllocationError) as raised:
            cluster.check(on_cpu=False)
        golden(raised)
        cluster.check(on_cpu=True)

    def test_a_node_that_does_not_answer_is_left_out(self, slurm: FakeSlurm) -> None:
        slurm.allocate({"n1": {}, "n2": {"dead": True}})
        cluster = find_cluster(SlurmOptions(python=str(slurm.python)))
        assert ([node.node for node in cluster.nodes], cluster.lost) == (["n1"], ("n2",))

    def test_a_node_that_does_not_answer_is_the_jobs_all_the_same(self, slurm: FakeSlurm) -> None:
        slurm.allocate({"n1": GPUS, "n2": {**GPUS, "dead": True}}, tasks=2)
        machine = find_cluster(SlurmOptions(python=str(slurm.python))).machine
        assert [gpu.uuid for gpu in machine.gpus] == ["GPU-0", "GPU-1", "GPU-2", "GPU-3", "", "", "", ""]
        assert (machine.gpu_kind, machine.cores) == ("h100-64gib", 4)

    def test_a_cpus_kind_is_the_nodes_and_not_what_a_job_has_of_it(self, slurm: FakeSlurm) -> None:
        kinds = set()
        for nodes, tasks in ((["n1", "n2"], 1), (["n1"], 1), (["n1"], 2)):
            slurm.allocate({name: {"cores": 64} for name in nodes}, tasks=tasks)
            machine = find_cluster(SlurmOptions(python=str(slurm.python))).machine
            assert machine.cores == len(nodes) * tasks, "as many ranks fit"
            kinds.add(machine.cpu_kind)
        assert kinds == {"cpu-epyc-64c"}

    def test_nodes_of_different_size_are_refused_on_the_cpu_too(self, slurm: FakeSlurm, golden: Golden) -> None:
        slurm.allocate({"n1": {"cores": 64}, "n2": {"cores": 128}})
        with pytest.raises(AllocationError) as raised:
            find_cluster(SlurmOptions(python=str(slurm.python))).check(on_cpu=True)
        golden(raised)


class TestCommand:
    def test_a_case_gets_the_nodes_and_gpus_it_needs(self, slurm: FakeSlurm, said: list[str], tmp_path: Path) -> None:
        slurm.allocate({"n1": GPUS, "n2": GPUS, "n3": GPUS})
        spec = TrainSpec(model="llama-tiny", gpus=6, sequence_length=16)
        slurm.yields(spec)
        record = launcher(slurm, said, on_cpu=False).launch(request(tmp_path, spec), lambda _: None)
        assert isinstance(record, Launch), record
        words = slurm.calls[-1]
        assert {"--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--nodelist=n1,n2", "--gres=gpu:3"} <= {*words}
        assert {"--cpus-per-task=8", "--cpu-bind=none", "--export=ALL", "--nproc-per-node=3", "--nnodes=2"} <= {*words}
        endpoint = next(word for word in words if word.startswith("--rdzv-endpoint="))
        assert endpoint.startswith(("--rdzv-endpoint=127.0.0.1:2", "--rdzv-endpoint=127.0.0.1:3"))
        assert "TORCH_NCCL_DUMP_ON_TIMEOUT=1" in words
        assert not any(word.startswith("CUDA_VISIBLE_DEVICES") for word in words), "SLURM sets it on each node"

    def test_where_slurm_knows_nothing_of_gpus_none_are_asked_for(
        self, slurm: FakeSlurm, said: list[str], tmp_path: Path
    ) -> None:
        slurm.allocate({"n1": {**GPUS, "granted": 0}})
        slurm.yields(SPEC)
        start = launcher(slurm, said, on_cpu=False)
        start._cluster.check(on_cpu=False)
        assert isinstance(start.launch(request(tmp_path), lambda _: None), Launch)
        assert not any(word.startswith("--gres") for word in slurm.calls[-1])

    def test_one_node_needs_no_meeting_place(self, slurm: FakeSlurm, said: list[str], tmp_path: Path) -> None:
        slurm.allocate({"n1": {}}, tasks=2)
        slurm.yields(SPEC)
        assert isinstance(launcher(slurm, said).launch(request(tmp_path), lambda _: None), Launch)
        assert "--standalone" in slurm.calls[-1]
        assert "CUDA_VISIBLE_DEVICES=" in slurm.calls[-1]

    @pytest.mark.parametrize(("on_cpu", "visible"), [(False, None), (True, "")])
    def test_a_rank_sees_the_gpus_of_its_node_and_on_the_cpu_none(
        self, slurm: FakeSlurm, said: list[str], tmp_path: Path, on_cpu: bool, visible: str | None
    ) -> None:
        slurm.allocate({"n1": {**GPUS, "granted": 0}}, tasks=2)  # here SLURM sets nothing that would mend it
        slurm.yields(SPEC)
        assert isinstance(launcher(slurm, said, on_cpu=on_cpu).launch(request(tmp_path), lambda _: None), Launch)
        seen = json.loads((tmp_path / "run" / "environment-n1.json").read_text())
        assert seen.get("CUDA_VISIBLE_DEVICES") == visible

    def test_modules_come_before_the_container_and_variables_inside_it(self, golden: Golden) -> None:
        options = SlurmOptions(prefix=("singularity", "exec", "--nv", "a.sif"), modules=("cuda/12", "nccl"))
        words = options.wrapped(["python", "-m", "x"], {"B": "two words", "A": "1"})
        golden(words[:4])
        assert words[4:] == ["singularity", "exec", "--nv", "a.sif", "env", "A=1", "B=two words", "python", "-m", "x"]

    def test_the_prefix_runs_on_the_nodes(self, slurm: FakeSlurm, said: list[str], tmp_path: Path) -> None:
        slurm.allocate({"n1": {}}, tasks=2)
        slurm.yields(SPEC)
        start = launcher(slurm, said, prefix=("env", "IN_CONTAINER=yes"), srun=("--mpi=none",), scratch=str(tmp_path))
        assert isinstance(start.launch(request(tmp_path), lambda _: None), Launch)
        seen = json.loads((tmp_path / "run" / "environment-n1.json").read_text())
        assert seen["IN_CONTAINER"] == "yes"
        assert "--mpi=none" in slurm.calls[-1]
        assert seen["TMPDIR"].startswith(str(tmp_path))
        assert not Path(seen["TMPDIR"]).exists(), "what a launch left there is gone"

    def test_what_sbatch_asked_for_does_not_reach_srun(self) -> None:
        left = step_environment(
            {"SLURM_JOB_ID": "7", "SLURM_GPUS_PER_TASK": "1", "SLURM_NTASKS": "8", "SLURM_CONF": "c"}
        )
        assert left == {"SLURM_JOB_ID": "7", "SLURM_CONF": "c"}

    def test_no_secret_reaches_a_command_line(self) -> None:
        assert passed_on({"NCCL_DEBUG": "INFO", "LLMPERF_API_KEY": "x", "HF_TOKEN": "y", "HOME": "z"}) == {
            "NCCL_DEBUG": "INFO"
        }


def variables(words: list[str]) -> dict[str, str]:
    """What a step's command says again on its nodes."""
    said = itertools.takewhile(lambda word: "=" in word, words[words.index("env") + 1 :])
    return dict(word.partition("=")[::2] for word in said)


class TestServers:
    @pytest.mark.parametrize("on_cpu", [True, False])
    def test_a_launch_finds_the_server_that_was_prepared_for_it(
        self,
        slurm: FakeSlurm,
        said: list[str],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        on_cpu: bool,
        golden: Golden,
    ) -> None:
        monkeypatch.setenv("NCCL_DEBUG", "WARN")
        monkeypatch.setenv("PYTHONPATH", f"/user{os.pathsep}{os.environ['PYTHONPATH']}")
        slurm.allocate({"n1": {} if on_cpu else GPUS, "n2": {} if on_cpu else GPUS})
        slurm.yields(SPEC)
        srun = Srun(cluster=find_cluster(options_of(slurm)), options=options_of(slurm), on_cpu=on_cpu)
        servers = NodeServers(srun, lambda: tmp_path)
        warm = WarmStart(ServerPool(lambda: tmp_path), said.append)
        asked = replace(request(tmp_path), warm=warm)
        record = SlurmLauncher(srun, say=said.append, servers=servers).launch(asked, lambda _: None)
        servers.close()
        assert isinstance(record, Launch), record
        (line,) = said
        golden(line)
        held, launched = (
            next(call for call in slurm.calls if any(word.startswith(f"--job-name={name}") for word in call))
            for name in ("llmperf-servers-", f"llmperf-{zlib.crc32(str(asked.folder).encode()):08x}")
        )
        # Of steps of their own, with what SLURM and a node's scratch set there.
        one, other = (
            {**variables(call), "TMPDIR": f"/{number}", "TRITON_CACHE_DIR": f"/{number}/triton", "SLURM_STEPID": number}
            for number, call in (("1", held), ("2", launched))
        )
        homes = [package_path(), str(asked.folder / "path")]
        keys = [server_key("python", each, homes, "/here", on_gpu=not on_cpu) for each in (one, other)]
        assert keys[0] == keys[1]
        assert dict(keys[0].environment)["PYTHONPATH"].split(os.pathsep)[0] == "/user"
        assert server_key("python", one, homes, "/there", on_gpu=not on_cpu) != keys[0]


class TestLaunch:
    def test_two_nodes_leave_a_record_with_their_places(
        self, slurm: FakeSlurm, said: list[str], tmp_path: Path
    ) -> None:
        slurm.allocate({"n1": {"switch": "leaf1"}, "n2": {"switch": "leaf2"}})
        slurm.yields(SPEC)
        record = launcher(slurm, said).launch(request(tmp_path), lambda _: None)
        assert isinstance(record, Launch), record
        assert record.evidence["slurm_nodes"] == "n1 n2"
        assert record.evidence["start"] == "cold"
        assert record.evidence["slurm_switches"] == "leaf1 leaf2"
        assert record.wall_seconds > 0

    def test_the_wait_for_nodes_is_not_metered(
        self, slurm: FakeSlurm, said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        slurm.allocate({"n1": {}, "n2": {}})
        slurm.yields(SPEC)

        @contextmanager
        def slow(num_nodes: int, _job: str, nodes: Sequence[str], _say: object) -> Iterator[list[str]]:
            time.sleep(1.0)
            yield list(nodes[:num_nodes])

        monkeypatch.setattr(slurm_module, "lease_nodes", slow)
        asked = request(tmp_path)
        start = time.monotonic()
        result = launcher(slurm, said).launch(asked, lambda _: None)
        assert isinstance(result, Launch)
        # It is rounded to a millisecond.
        assert result.wall_seconds - 0.001 <= asked.meter.seconds < time.monotonic() - start - 1.0
        assert 1.0 <= asked.meter.waited_seconds < 1.5

    def test_where_its_time_went_is_told_by_the_first_node(
        self, slurm: FakeSlurm, said: list[str], tmp_path: Path
    ) -> None:
        slurm.allocate({"n1": {}, "n2": {}}, reached=["importing", "building", "training", "finishing"])
        slurm.yields(SPEC)
        record = launcher(slurm, said).launch(request(tmp_path), lambda _: None)
        assert isinstance(record, Launch), record
        assert list(record.phases) == ["start", "imports", "model", "first_step", "steps", "end"]
        assert sum(record.phases.values()) == pytest.approx(record.wall_seconds, abs=0.002)
        assert record.phases["start"] > 0

    def test_a_record_that_appears_late_is_waited_for(self, slurm: FakeSlurm, said: list[str], tmp_path: Path) -> None:
        slurm.allocate({"n1": {}, "n2": {}})
        slurm.yields(SPEC, late=2)
        assert isinstance(launcher(slurm, said).launch(request(tmp_path), lambda _: None), Launch)

    def test_a_record_that_never_appears_is_told(
        self, slurm: FakeSlurm, said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Golden
    ) -> None:
        monkeypatch.setattr(step_outcome, "LATE_SECONDS", 1.0)
        slurm.allocate({"n1": {}, "n2": {}})
        failure = launcher(slurm, said).launch(request(tmp_path), lambda _: None)
        assert isinstance(failure, Failure)
        golden(failure.message)

    def test_a_rank_that_fails_says_why(self, slurm: FakeSlurm, said: list[str], tmp_path: Path) -> None:
        slurm.allocate({"n1": {}, "n2": {"fails": "rank 1: ValueError: no"}})
        failure = launcher(slurm, said).launch(request(tmp_path), lambda _: None)
        assert isinstance(failure, Failure)
        assert (failure.kind, failure.message, failure.rank) == ("error", "rank 1: ValueError: no", 1)

    def test_one_that_failed_tells_who_else_was_there(self, tmp_path: Path) -> None:
        for node, lines in (("n1", []), ("n2", ["GPU 3: pid 7"])):
            end = {"returncode": 1, "timed_out": False, "signalled": False, "health": {"foreign_processes": lines}}
            (tmp_path / f"node-{node}.end.json").write_text(json.dumps(end))
        ended = Ended(returncode=1, timed_out=False, seconds=1.0)
        failure = step_outcome.gather(tmp_path, SPEC, ["n1", "n2"], ended, Progress(phase="training"))
        assert isinstance(failure, Failure)
        assert failure.health.foreign_processes == ("GPU 3: pid 7",)

    @pytest.mark.parametrize(
        ("trouble", "what"), [({"dead": True}, "did not begin"), ({"silent": True}, "went silent")]
    )
    def test_a_broken_node_is_left_out_and_the_launch_tried_once_more(
        self, slurm: FakeSlurm, said: list[str], tmp_path: Path, trouble: dict[str, object], what: str, golden: Golden
    ) -> None:
        slurm.allocate({"n1": {}, "n2": {}, "n3": {}})
        slurm.yields(SPEC)
        start = launcher(slurm, said)
        slurm.plan(nodes={"n1": {}, "n2": trouble, "n3": {}})
        record = start.launch(request(tmp_path), lambda _: None)
        assert isinstance(record, Launch), record
        assert record.evidence["slurm_nodes"] == "n1 n3"
        assert f"node n2 {what}" in said[0]
        golden(said[0])
        assert "--nodelist=n1,n3" in slurm.calls[-1]

    def test_a_node_that_slurm_gave_up_is_left_out_and_not_the_one_it_killed_for_that(
        self, slurm: FakeSlurm, said: list[str], tmp_path: Path, golden: Golden
    ) -> None:
        slurm.allocate({"n1": {}, "n2": {}, "n3": {}})
        start = launcher(slurm, said)
        slurm.plan(nodes={"n1": {"silent": True}, "n2": {"state": "DOWN+NOT_RESPONDING"}, "n3": {}})
        start.launch(request(tmp_path), lambda _: None)
        golden(said)
        assert any("--nodelist=n1,n3" in call for call in slurm.calls)

    def test_a_step_that_srun_refuses_is_no_broken_node(
        self, slurm: FakeSlurm, said: list[str], tmp_path: Path, golden: Golden
    ) -> None:
        slurm.allocate({"n1": {}, "n2": {}, "n3": {}}, step_refused="Invalid generic resource (gres) specification")
        start = launcher(slurm, said)
        failure = start.launch(request(tmp_path), lambda _: None)
        assert isinstance(failure, Failure)
        assert failure.kind == "never-started"
        golden(failure.message)
        (line,) = said
        golden(line)
        assert line.endswith("tried once more")
        slurm.plan(step_refused="")
        slurm.yields(SPEC)
        record = start.launch(replace(request(tmp_path), folder=tmp_path / "next"), lambda _: None)
        assert isinstance(record, Launch), record
        assert record.evidence["slurm_nodes"] == "n1 n2", "nor are its nodes lost"

    def test_a_controller_that_restarts_costs_no_case_and_no_node(
        self, slurm: FakeSlurm, said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(slurm_module, "_ASK_AGAIN_SECONDS", 0.01)
        slurm.allocate({"n1": {}, "n2": {}})
        slurm.yields(SPEC)
        start = launcher(slurm, said)
        slurm.plan(step_refused="Unable to contact slurm controller (connect failure)", refused_once=True)
        slurm.plan(silent_answers=5)
        record = start.launch(request(tmp_path), lambda _: None)
        assert isinstance(record, Launch), record
        assert record.evidence["slurm_nodes"] == "n1 n2"
        assert len(said) == 1

    def test_without_nodes_left_a_broken_one_is_named(
        self, slurm: FakeSlurm, said: list[str], tmp_path: Path, golden: Golden
    ) -> None:
        slurm.allocate({"n1": {}, "n2": {}})
        start = launcher(slurm, said)
        slurm.plan(nodes={"n1": {}, "n2": {"dead": True}})
        failure = start.launch(request(tmp_path), lambda _: None)
        assert isinstance(failure, Failure)
        assert failure.kind == "node-failure"
        golden(failure.message)
        again = start.launch(LaunchRequest(spec=SPEC, folder=tmp_path / "next", gpus=(), timeout_seconds=60), print)
        assert isinstance(again, Failure)
        golden(again.message)

    def test_a_node_that_is_lost_to_the_job_is_named_to_whoever_may_begin_anew(
        self, slurm: FakeSlurm, said: list[str], tmp_path: Path
    ) -> None:
        slurm.allocate({"n1": {}, "n2": {}})
        start = launcher(slurm, said)
        slurm.plan(nodes={"n1": {}, "n2": {"dead": True, "state": "MIXED"}})  # SLURM has not given it up yet
        for name in ("run", "next"):  # found by the first, known to the second
            failure = start.launch(replace(request(tmp_path), folder=tmp_path / name), lambda _: None)
            assert isinstance(failure, Failure)
            assert failure.lost_nodes == ("n2",)

    def test_a_node_that_broke_a_launch_and_works_is_not_lost(
        self, slurm: FakeSlurm, said: list[str], tmp_path: Path
    ) -> None:
        slurm.allocate({"n1": {}, "n2": {}})
        start = launcher(slurm, said)
        slurm.plan(nodes={"n1": {}, "n2": {"silent": True}})
        failure = start.launch(request(tmp_path), lambda _: None)
        assert isinstance(failure, Failure)
        assert (failure.kind, failure.lost_nodes) == ("node-failure", ())

    def test_a_case_that_was_always_too_large_lacks_no_lost_node(
        self, slurm: FakeSlurm, said: list[str], tmp_path: Path
    ) -> None:
        slurm.allocate({"n1": {}, "n2": {"dead": True}})
        spec = TrainSpec(model="llama-tiny", gpus=4, sequence_length=16)
        failure = launcher(slurm, said).launch(request(tmp_path, spec), lambda _: None)
        assert isinstance(failure, Failure)
        assert (failure.kind, failure.lost_nodes) == ("never-started", ())

    def test_a_torchrun_that_was_killed_is_told_with_its_node(
        self, slurm: FakeSlurm, said: list[str], tmp_path: Path, golden: Golden
    ) -> None:
        slurm.allocate({"n1": {}, "n2": {"killed": True}})
        failure = launcher(slurm, said).launch(request(tmp_path), lambda _: None)
        assert isinstance(failure, Failure)
        assert (failure.kind, said) == ("killed", [])
        golden(failure.message)

    def test_a_word_that_a_node_cannot_leave_costs_no_node(
        self, slurm: FakeSlurm, said: list[str], tmp_path: Path, golden: Golden
    ) -> None:
        slurm.allocate({"n1": {}, "n2": {"unwritable": True}, "n3": {}})
        start = launcher(slurm, said)
        failure = start.launch(request(tmp_path), lambda _: None)
        assert isinstance(failure, Failure)
        assert failure.kind == "unwritable"
        golden(failure.message)
        assert any("Is a directory: " in line and "node-n2.end.json" in line for line in failure.tail)
        assert said == [], "it was not tried again"
        slurm.plan(nodes={"n1": {}, "n2": {}, "n3": {}})
        slurm.yields(SPEC)
        record = start.launch(replace(request(tmp_path), folder=tmp_path / "next"), lambda _: None)
        assert isinstance(record, Launch), record
        assert record.evidence["slurm_nodes"] == "n1 n2"

    def test_nodes_that_do_not_meet_are_told(
        self, slurm: FakeSlurm, said: list[str], tmp_path: Path, golden: Golden
    ) -> None:
        slurm.allocate({"n1": {"meets_nobody": True}, "n2": {"meets_nobody": True}})
        failure = launcher(slurm, said).launch(request(tmp_path), lambda _: None)
        assert isinstance(failure, Failure)
        assert failure.kind == "rendezvous"
        golden(failure.message)

    def test_a_hang_ends_at_the_limit(self, slurm: FakeSlurm, said: list[str], tmp_path: Path) -> None:
        slurm.allocate({"n1": {}, "n2": {"hangs": True}})
        failure = launcher(slurm, said).launch(request(tmp_path, limit=3), lambda _: None)
        assert isinstance(failure, Failure)
        assert failure.kind == "timeout"
        assert "--perf-timeout" in failure.message

    def test_a_step_that_outlives_its_srun_is_cancelled(
        self, slurm: FakeSlurm, said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(slurm_module, "_BEYOND_SECONDS", -58.0)  # before the nodes' own limit
        slurm.allocate({"n1": {}, "n2": {"hangs": True}})
        launcher(slurm, said).launch(request(tmp_path, limit=60), lambda _: None)
        assert slurm.cancelled == ["7.1"]

    def test_a_step_that_is_interrupted_is_cancelled(
        self, slurm: FakeSlurm, said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def interrupted(_: object) -> None:
            if len(slurm.calls) > 1:
                raise KeyboardInterrupt

        slurm.allocate({"n1": {}, "n2": {"hangs": True}})
        monkeypatch.setattr(ProgressReader, "poll", interrupted)
        with pytest.raises(KeyboardInterrupt):
            launcher(slurm, said).launch(request(tmp_path), lambda _: None)
        assert slurm.cancelled == ["7.1"]

    def test_a_step_that_ended_by_itself_is_not(self, slurm: FakeSlurm, said: list[str], tmp_path: Path) -> None:
        slurm.allocate({"n1": {}, "n2": {}})
        slurm.yields(SPEC)
        assert isinstance(launcher(slurm, said).launch(request(tmp_path), lambda _: None), Launch)
        assert slurm.cancelled == []

    def test_a_missing_container_program_is_named(self, slurm: FakeSlurm, said: list[str], tmp_path: Path) -> None:
        slurm.allocate({"n1": {}}, tasks=2)
        start = launcher(slurm, said)
        slurm.python.unlink()
        failure = start.launch(request(tmp_path), lambda _: None)
        assert isinstance(failure, Failure)
        assert failure.kind == "node-failure"
        assert failure.lost_nodes == (), "the node works: another start would find it as it is"
        assert any("fake-python" in line for line in failure.tail)


class TestTime:
    def test_no_launch_starts_that_cannot_end(self, slurm: FakeSlurm, said: list[str], tmp_path: Path) -> None:
        slurm.allocate({"n1": {}, "n2": {}}, seconds_left=50)
        with pytest.raises(OutOfTimeError, match=r"was not started.*SLURM job 7 reaches its time limit"):
            launcher(slurm, said).launch(request(tmp_path), lambda _: None)
        assert len(slurm.calls) == 1

    def test_a_launch_that_runs_into_the_limit_is_ended_before_it(
        self, slurm: FakeSlurm, said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("pytest_llmperf.launch.slurm.slurm_site._UNKNOWN_SECONDS", 1.0)
        slurm.allocate({"n1": {}, "n2": {"hangs": True}}, seconds_left=34)
        with pytest.raises(OutOfTimeError, match="was ended"):
            launcher(slurm, said).launch(request(tmp_path), lambda _: None)

    def test_a_start_that_slurm_gave_up_starts_nothing_beside_the_next_one(
        self, slurm: FakeSlurm, said: list[str], tmp_path: Path, golden: Golden
    ) -> None:
        slurm.allocate({"n1": {}, "n2": {}}, restarts=1)
        slurm.yields(SPEC)
        start = launcher(slurm, said)
        assert isinstance(start.launch(request(tmp_path), lambda _: None), Launch)
        slurm.plan(restarts=2)
        with pytest.raises(OutOfTimeError) as raised:
            start.launch(replace(request(tmp_path), folder=tmp_path / "next"), lambda _: None)
        golden(raised)


def test_health_of_several_nodes_is_the_worst() -> None:
    one = Health(sm_clock_mhz=1900, power_watts=600, memory_errors=1, clock_reasons={"idle": 0.1})
    other = Health(sm_clock_mhz=1700, temperature_celsius=80, power_watts=500, foreign_processes=("GPU 0: pid 1",))
    both = step_outcome.worst([one, other])
    assert (both.sm_clock_mhz, both.power_watts, both.temperature_celsius, both.memory_errors) == (1700, 1100, 80, 1)
    assert both.foreign_processes == ("GPU 0: pid 1",)


def test_energy_that_one_node_does_not_tell_is_unknown() -> None:
    assert step_outcome.worst([Health(power_watts=600), Health()]).power_watts == 0
