"""The ``llmperf`` command: what it prints, what it says of what is not there, and that it starts light."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pytest_llmperf.cli import answer, main
from pytest_llmperf.cli.answer import NotStoredError, Screen
from pytest_llmperf.cli.baseline_folder import Shelf, Stored, read
from pytest_llmperf.cli.commands.baselines import (
    list_page,
    short_site,
    show_page,
)
from pytest_llmperf.judge.baseline import Baseline, BaselineStore
from pytest_llmperf.judge.store import Accepted, text_of
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.metrics import measured
from pytest_llmperf.settings.train_spec import TrainSpec
from pytest_llmperf.support import codec
from tests.fakes import Fake, launch_of
from tests.golden import Golden
from tests.shelf import Run, keep, llmperf_on

REPOSITORY = Path(__file__).parents[3]
SPEC = TrainSpec(model="llama-tiny", sequence_length=64, steps=12, warmup_steps=4)
OTHER = replace(SPEC, attention="eager", micro_batch_size=2)
PIPE = Screen(width=None)


def launch(step_seconds: float = 0.1, spec: TrainSpec = SPEC, day: int = 1, **fake: Any) -> Launch:
    fresh = launch_of(spec, Fake(step_seconds=step_seconds, **fake))
    return replace(fresh, started_at=f"2026-01-{day:02}T00:00:00Z")


def accepted(old: Baseline | None, *launches: Launch, spec: TrainSpec = SPEC, **other: Any) -> Baseline:
    """What is stored once ``launches`` joined; what may be accepted at all is no question of this room."""
    entry = Accepted(
        recorded_at=launches[0].started_at,
        reason=other.pop("reason", ""),
        launches=len(launches),
        metrics={name: metric.read(launches) for name, metric in measured().items()},
        revision=other.pop("revision", ""),
    )
    values: dict[str, Any] = {
        "id": spec.id,
        "digest": spec.digest,
        "machine": "m",
        "spec": spec.to_dict(),
        "recorded_by": "t.py::t",
        "launches": (*(old.launches if old else ()), *launches),
        "anchor": old.anchor if old else entry,
        "history": (*(old.history if old else ()), entry),
    }
    return Baseline(**{**values, **other})


FIRST = accepted(None, launch(), launch(0.102, day=2))
SLOWER = replace(
    accepted(FIRST, launch(0.2, day=3), reason="a slower driver", revision="0123456789abcdef"),
    launches=(launch(0.2, day=3),),
)
EAGER = accepted(None, launch(0.1, OTHER, versions={"torch": "3.0"}), spec=OTHER)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return keep(tmp_path / "baselines", SLOWER, EAGER)


@pytest.fixture
def llmperf(capsys: pytest.CaptureFixture[str], root: Path) -> Run:
    """Runs ``llmperf baselines …`` on ``root``."""
    run = llmperf_on(root, capsys)
    return lambda command, *arguments: run(f"baselines {command}", *arguments)


def one_line(err: str) -> str:
    assert err.startswith("llmperf: ")
    assert err.count("\n") == 1
    return err


class TestList:
    def test_a_line_each_under_its_machine(self, golden: Golden) -> None:
        elsewhere = accepted(None, launch(), machine="a")
        stored = [Stored(Path("f"), one) for one in (SLOWER, EAGER, elsewhere)]
        lines = [re.sub(r" +", " ", line) for line in list_page(stored, PIPE)]
        golden(lines)

    def test_loss_curves_that_older_versions_stored_are_no_baselines(
        self, llmperf: Run, root: Path, tmp_path: Path
    ) -> None:
        before = llmperf("list")
        for folder in (root, tmp_path / "curves alone"):
            (folder / "loss-curves").mkdir(parents=True)
            (folder / "loss-curves" / f"{SPEC.id}.json").write_text('{"schema": 1, "curves": []}', encoding="utf-8")
        assert llmperf("list") == before
        with pytest.raises(NotStoredError, match="no baselines here"):
            Shelf.read(tmp_path / "curves alone")

    def test_the_default_folder_is_beside_the_user(
        self, root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.chdir(root.parent)
        assert main(["baselines", "list"]) == 0
        assert SPEC.id in capsys.readouterr().out

    def test_a_machine(self, llmperf: Run, root: Path) -> None:
        keep(root, accepted(None, launch(), machine="other"))
        assert llmperf("list", "--machine", "other")[1].splitlines()[0] == "other"
        assert len(llmperf("list")[1].splitlines()) == 8

    def test_an_unknown_machine_names_the_nearest(self, llmperf: Run, golden: Golden) -> None:
        code, out, err = llmperf("list", "--machine", "mm")
        assert (code, out) == (1, "")
        golden(one_line(err))

    def test_none(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["baselines", "list", "--perf-baselines", str(tmp_path / "none")]) == 1
        assert "no baselines here" in one_line(capsys.readouterr().err)

    def test_none_here_and_some_further_up_in_the_same_work_tree(
        self, root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], golden: Golden
    ) -> None:
        sub = root.parent / "sub/deeper"
        sub.mkdir(parents=True)
        monkeypatch.chdir(sub)
        assert main(["baselines", "list"]) == 1
        golden(one_line(capsys.readouterr().err))  # whose are they, outside of git?
        (root.parent / ".git").mkdir()
        assert main(["baselines", "list"]) == 1
        golden(one_line(capsys.readouterr().err))

    def test_a_narrow_terminal_loses_nothing(self) -> None:
        lines = list_page([Stored(Path("f"), SLOWER)], Screen(width=50))
        assert max(map(len, lines)) <= 50
        assert "2026-01-03" in "\n".join(lines)


class TestBrokenFiles:
    def test_the_others_are_still_listed(self, llmperf: Run, root: Path) -> None:
        path = root / "m/llama-tiny/broken.json"
        path.write_text("{")
        code, out, err = llmperf("list")
        assert code == 1
        assert SPEC.id in out
        assert one_line(err).startswith(f"llmperf: {path}: not JSON")

    def test_the_neighbour_of_one_is_shown(self, llmperf: Run, root: Path) -> None:
        (root / "m/llama-tiny/broken.json").write_text("{")
        assert llmperf("show", SPEC.id)[::2] == (0, "")

    def test_asked_for_by_name_it_says_what_is_wrong(self, llmperf: Run, root: Path, golden: Golden) -> None:
        (root / "m/llama-tiny/broken.json").write_text("")
        code, out, err = llmperf("show", "broken")
        assert (code, out) == (1, "")
        golden(one_line(err))

    def test_in_another_machines_folder(self, llmperf: Run, root: Path, golden: Golden) -> None:
        (root / "m").rename(root / "n")
        code, _, err = llmperf("list")
        assert code == 1
        golden(err)

    @pytest.mark.parametrize(
        "change",
        [
            {"started_at": 5},
            {"evidence": []},
            {"warmup_steps": 4.0},
            {"ranks": [{**codec.plain(launch())["ranks"][0], "device": 7}]},
            {"ranks": [{**codec.plain(launch())["ranks"][0], "step_seconds": [10**400] * 12}]},
        ],
        ids=lambda change: next(iter(change)),
    )
    def test_a_field_of_the_wrong_type_is_a_line_too(self, llmperf: Run, root: Path, change: dict[str, Any]) -> None:
        path = BaselineStore(root).path("m", SPEC)
        document = json.loads(path.read_text())
        document["launches"][0].update(change)
        path.write_text(json.dumps(document))
        code, out, err = llmperf("list")
        assert (code, OTHER.id in out, SPEC.id in out) == (1, True, False)
        assert str(path) in one_line(err)

    def test_a_folder_in_its_place(self, llmperf: Run, root: Path) -> None:
        (root / "m/llama-tiny/folder.json").mkdir()
        assert "cannot be read" in one_line(llmperf("list")[2])


class TestStrayCopies:
    @pytest.fixture
    def copy(self, root: Path) -> Path:
        """Of what was stored before, as a file manager leaves one."""
        path = BaselineStore(root).path("m", SPEC)
        copy = path.with_name(f"{path.stem} copy.json")
        copy.write_text(text_of(FIRST))
        return copy

    def test_one_is_a_line_and_not_listed(self, llmperf: Run, root: Path, copy: Path, golden: Golden) -> None:
        code, out, err = llmperf("list")
        assert (code, out.count(SPEC.id), " 320 " in out) == (1, 1, True)
        BaselineStore(root).path("m", SPEC)
        golden(one_line(err))

    def test_its_case_is_found_by_id_and_digest(self, llmperf: Run, copy: Path) -> None:
        assert copy.exists()
        for case in (SPEC.id, SPEC.digest):
            code, out, err = llmperf("show", case)
            assert (code, err) == (0, "")
            assert "a slower driver" in out
            assert "320 tokens" in out

    def test_it_can_be_looked_at_by_its_name(self, llmperf: Run, copy: Path) -> None:
        code, out, _ = llmperf("show", copy)
        assert (code, "634 tokens/s/GPU" in out) == (0, True)


class TestShow:
    def test_everything(self) -> None:
        baseline = accepted(FIRST, launch(0.101, day=3))
        assert show_page(Stored(Path("some/file.json"), baseline), PIPE) == [
            SPEC.id,
            "  machine      m",
            f"  digest       {SPEC.digest}",
            "  file         some/file.json",
            "  recorded by  t.py::t",
            "  settings     model=llama-tiny, sequence_length=64, steps=12",
            "  baseline     634 tokens/s/GPU, 1.00 GiB (3 launches in 3 sessions, calibrated)",
            "  best         634 tokens/s/GPU, 1.00 GiB",
            "  anchor       634 tokens/s/GPU, 1.00 GiB of 2026-01-01",
            "",
            "accepted    tokens/s/GPU  vs before  vs anchor  peak memory  launches  revision  reason",
            "2026-01-01           634          -      0.0 %     1.00 GiB         2  -         -",
            "2026-01-03           634      0.0 %      0.0 %     1.00 GiB         1  -         -",
            "",
            "launches",
            "started               site           median step  tokens/s/GPU  vs mean  peak memory  steps  steady from",
            "2026-01-01T00:00:00Z  host Fake CPU        0.1 s           640   +1.0 %     1.00 GiB     12  step 5",
            "2026-01-02T00:00:00Z  host Fake CPU      0.102 s           627   -1.0 %     1.00 GiB     12  step 5",
            "2026-01-03T00:00:00Z  host Fake CPU      0.101 s           634    0.0 %     1.00 GiB     12  step 5",
            "",
            "environment of the newest launch",
            "  gpu       Fake CPU",
            "  driver    -",
            "  platform  Linux x86_64",
            "  python    3.11.7",
            "  torch     2.0",
        ]

    @pytest.mark.parametrize("digits", [6, 10, 16])
    def test_by_digest(self, llmperf: Run, digits: int) -> None:
        code, out, _ = llmperf("show", SPEC.digest[:digits])
        assert (code, out.splitlines()[0]) == (0, SPEC.id)

    def test_by_file_whatever_the_folder_holds(self, llmperf: Run, root: Path) -> None:
        path = BaselineStore(root).path("m", SPEC).rename(root.parent / "kept.json")
        assert llmperf("show", path)[1].splitlines()[0] == SPEC.id

    def test_control_characters_of_a_file_move_no_cursor(self, golden: Golden) -> None:
        page = show_page(Stored(Path("f"), replace(FIRST, recorded_by="\x1b[2J\nt.py")), PIPE)
        golden(page)

    @pytest.mark.parametrize(
        ("site", "short"),
        [
            ("NVIDIA H200 0f5ddc53-5e15-3455-549e-29935d46feb5", "NVIDIA H200 0f5ddc53"),
            (" + ".join(["A 0f5ddc53-5e15-3455-549e-29935d46feb5"] * 8), "A 0f5ddc53 + 7 more"),
            ("host Fake CPU", "host Fake CPU"),
        ],
    )
    def test_a_site_is_short(self, site: str, short: str) -> None:
        assert short_site(site) == short


class TestNoSuchCase:
    def test_the_nearest_is_named(self, llmperf: Run, golden: Golden) -> None:
        code, out, err = llmperf("show", SPEC.id.replace("sdpa", "sdap"))
        assert (code, out) == (1, "")
        golden(one_line(err))

    @pytest.mark.parametrize("case", [SPEC.digest[:5], "none/such.json", "x" * 5000, "\x1b[2J", "\udcff"])
    def test_whatever_is_asked(self, llmperf: Run, case: str) -> None:
        code, _, err = llmperf("show", case)
        assert code == 1
        assert "no such case" in one_line(err)

    def test_one_of_several_machines_has_to_be_chosen(self, llmperf: Run, root: Path, golden: Golden) -> None:
        keep(root, accepted(None, launch(), machine="other"))
        code, _, err = llmperf("show", SPEC.id)
        assert code == 1
        golden(one_line(err))
        assert llmperf("show", SPEC.id, "--machine", "other")[0] == 0


def acceptances(baseline: Baseline) -> list[str]:
    lines = show_page(Stored(Path("f"), baseline), PIPE)
    first = next(i for i, line in enumerate(lines) if line.startswith("accepted "))
    return lines[first : lines.index("launches") - 1]


def test_every_acceptance_is_shown(golden: Golden) -> None:
    golden([re.sub(r"  +", "|", line) for line in acceptances(SLOWER)])


def test_figures_that_were_not_recorded_are_dashes() -> None:
    bare = replace(FIRST.anchor, metrics={})
    lines = acceptances(replace(FIRST, anchor=bare, history=(bare,)))
    assert lines[1].split() == ["2026-01-01", "-", "-", "-", "-", "2", "-", "-"]


@pytest.mark.parametrize(
    ("words", "nearest"),
    [(["hsitory"], "history"), (["baselines", "lsit"], "list"), (["plan", "--format=tex"], "text")],
)
def test_a_misspelt_word_is_told_the_nearest(
    words: list[str], nearest: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert f"did you mean {nearest!r}?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "instead"),
    [
        (["explain"], "llmperf report"),
        (["baselines", "diff"], "perf.compare"),
        (["export", "r.json", "--format=junit"], "--junit-xml"),
        (["tune", "llama-tiny", "--write", "t.py"], "--record"),
    ],
)
def test_what_is_gone_says_what_serves_instead(
    words: list[str], instead: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert re.search(rf"\(removed; .*{instead}", capsys.readouterr().err)


@pytest.mark.parametrize("path", sorted((REPOSITORY / "baselines").glob("*/*/*.json")), ids=lambda path: path.stem)
def test_stored_ones_are_shown(path: Path) -> None:
    stored = read(path)
    assert len(show_page(stored, PIPE)) > 2


def test_the_largest_micro_batches_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["baselines", "list", "--perf-baselines", str(REPOSITORY / "baselines")]) == 0
    lines = capsys.readouterr().out.splitlines()
    heading = next(i for i, line in enumerate(lines) if "largest micro-batch of" in line)
    assert any("llama-3.2-1b-bf16-eager-maxmbs-gpus1" in line and line.split()[2] == "8" for line in lines[heading:])


class TestLargestMicroBatch:
    CASE = "llama-3.2-1b-bf16-sdpa-maxmbs-gpus1"
    FILE = REPOSITORY / f"baselines/nvidia-h200-140gib/llama-3.2-1b/capacity/{CASE}.json"

    @pytest.fixture
    def run(self, capsys: pytest.CaptureFixture[str]) -> Run:
        run = llmperf_on(REPOSITORY / "baselines", capsys)
        return lambda command: run(command, "--machine", "nvidia-h200-140gib")

    @pytest.mark.parametrize("case", [CASE, "a92ac5a7", str(FILE)])
    def test_it_is_shown(self, run: Run, case: str) -> None:
        code, out, err = run(f"baselines show {case}")
        assert (code, err) == (0, "")
        lines = {line.strip() for line in out.splitlines()}
        assert {self.CASE, "digest               a92ac5a7da840b86", "largest micro-batch  39 sequences"} <= lines
        assert "anchor               39 sequences of 2026-11-21" in lines
        assert "micro_batch_size" not in out

    @pytest.mark.parametrize("case", [CASE, str(FILE)])
    def test_it_has_a_history(self, run: Run, case: str) -> None:
        code, out, _ = run(f"baselines show {case}")
        *_, heading, row = out.splitlines()
        assert (code, heading.split()[0]) == (0, "accepted")
        assert row.split()[:3] == ["2026-11-21", "39", "1"]

    @pytest.mark.parametrize("command", ["plan {0}"])
    def test_where_launches_are_needed_it_says_so(self, run: Run, command: str, golden: Golden) -> None:
        code, _, err = run(command.format(self.CASE))
        assert code == 1
        golden(err)

    def test_a_slip_in_its_name_finds_it(self, run: Run, golden: Golden) -> None:
        golden(one_line(run("baselines show llama-3.2-1b-bf16-sdpa-maxmb")[2]))

    def test_in_another_machines_folder(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], golden: Golden
    ) -> None:
        path = tmp_path / "m/llama-3.2-1b/capacity" / self.FILE.name
        path.parent.mkdir(parents=True)
        path.write_text(self.FILE.read_text())
        _, out, err = llmperf_on(tmp_path, capsys)("baselines list")
        assert self.CASE not in out
        golden(one_line(err))


def test_a_capacity_that_cannot_be_read_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "card" / "llama" / "capacity"
    folder.mkdir(parents=True)
    (folder / "x.json").write_text("{")
    assert main(["baselines", "list", "--perf-baselines", str(tmp_path)]) == 1
    assert "x.json" in one_line(capsys.readouterr().err)


@pytest.mark.processes
class TestProcess:
    """In a process of its own, as a user starts it."""

    def run(self, script: str, **options: Any) -> subprocess.CompletedProcess[str]:
        command = ["bash", "-c", script.replace("llmperf", f"{sys.executable} -m pytest_llmperf")]
        return subprocess.run(command, cwd=REPOSITORY, text=True, capture_output=True, check=False, **options)

    def test_it_is_a_module_too(self, root: Path) -> None:
        done = self.run(f"llmperf baselines list --perf-baselines {root}")
        assert (done.returncode, done.stderr) == (0, "")
        assert SPEC.id in done.stdout

    @pytest.mark.parametrize("command", [["list"], ["show", SPEC.id]])
    def test_nothing_heavy_is_imported(self, root: Path, command: list[str]) -> None:
        arguments = ["baselines", *command, "--perf-baselines", str(root)]
        heavy = {"torch", "transformers", "accelerate", "numpy", "scipy", "pytest", "pynvml"}
        code = (
            f"import sys; from pytest_llmperf.cli import main; code = main({arguments!r})\n"
            f"print(sorted({heavy!r} & sys.modules.keys()), code)"
        )
        done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, text=True, capture_output=True, check=False)
        assert done.stdout.splitlines()[-1] == "[] 0"

    @pytest.mark.parametrize("asked", ["baselines list --perf-baselines {root}", "--help", "baselines list --help"])
    def test_a_closed_pipe_is_silent(self, root: Path, asked: str) -> None:
        asked = asked.format(root=root)
        done = self.run(f"set -o pipefail; (sleep 0.5; llmperf {asked}) | true")
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")

    def test_a_full_disk_is_one_line(self, root: Path) -> None:
        done = self.run(f"llmperf baselines list --perf-baselines {root} > /dev/full")
        assert done.returncode == 1
        assert "No space left" in one_line(done.stderr)

    def test_no_output_at_all(self, root: Path) -> None:
        done = self.run(f"llmperf baselines list --perf-baselines {root} >&-")
        assert (done.returncode, done.stderr) == (0, "")

    def test_an_output_that_shows_only_ascii(self, root: Path) -> None:
        keep(root, replace(FIRST, recorded_by="prüfung.py"))
        done = self.run(f"PYTHONIOENCODING=ascii llmperf baselines show {SPEC.id} --perf-baselines {root}")
        assert (done.returncode, done.stderr) == (0, "")
        assert r"pr\xfcfung.py" in done.stdout


def _interrupted() -> None:
    raise KeyboardInterrupt  # by no signal: workers of xdist ignore Ctrl-C


def _terminated() -> None:
    signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize(("end", "code"), [(_terminated, 143), (_interrupted, 130)])
def test_a_command_that_is_ended_tells_a_shell_by_what(
    end: Callable[[], None], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM ends it as Ctrl-C does, so that what it began is ended and what it knows is told."""
    ended: list[bool] = []

    def command(_argv: object) -> int:
        try:
            end()
        finally:
            ended.append(True)
        return 0

    monkeypatch.setattr(answer, "_run", command)
    before = signal.getsignal(signal.SIGTERM)
    assert main([]) == code
    assert ended
    assert signal.getsignal(signal.SIGTERM) is before
