"""The nightly script and the cluster examples: with the package, wherever it is installed and the command started."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from pytest_llmperf.cli import main
from pytest_llmperf.cli.answer import ClusterError
from pytest_llmperf.cli.commands.submit import folder
from tests.golden import Golden

REPOSITORY = Path(__file__).parents[3]
EXAMPLES = sorted((REPOSITORY / "slurm" / "clusters").glob("*.ini"))
MINIMAL = "[cluster]\ngpus_per_node = 1\n[suite]\ngpus = 1\noptions = --perf-strict\n"


@pytest.mark.processes
class TestInAProjectOfOnesOwn:
    def test_a_night_needs_no_checkout_of_ours(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.chdir(tmp_path)
        Path("my.ini").write_text(MINIMAL)
        assert main(["submit", "my.ini", "--dry-run"]) == 0
        assert "#SBATCH --requeue" in capsys.readouterr().out

    @pytest.mark.parametrize("name", [path.stem for path in EXAMPLES])
    def test_each_example_is_printed_as_it_stands(self, name: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["submit", "--example", name]) == 0
        assert capsys.readouterr().out == (REPOSITORY / "slurm" / "clusters" / f"{name}.ini").read_text("ascii")

    def test_without_a_name_the_examples_are_listed(self, capsys: pytest.CaptureFixture[str], golden: Golden) -> None:
        assert main(["submit", "--example"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line.split()[0] for line in lines[: len(EXAMPLES)]] == [path.stem for path in EXAMPLES]
        golden(lines[1])

    @pytest.mark.parametrize(
        ("words", "code", "said"),
        [
            (
                ["--example", "marenostrum"],
                1,
                "no example 'marenostrum' (did you mean 'marenostrum5-acc'?); known: gen",
            ),
            (["--example", "generic-pyxis", "my.ini"], 2, "--example submits nothing"),
            ([], 2, "expected CLUSTER.ini, or --example"),
            (["nothing.ini"], 1, "llmperf submit --example has some"),
        ],
    )
    def test_what_cannot_be_meant_is_one_line(
        self, words: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        try:
            found = main(["submit", *words])
        except SystemExit as exit_:  # argparse's
            found = int(str(exit_.code))
        assert found == code
        assert said in capsys.readouterr().err.splitlines()[-1]

    def test_a_package_without_its_script_says_where_it_looked(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Golden
    ) -> None:
        monkeypatch.setattr("pytest_llmperf.__file__", str(tmp_path / "pytest_llmperf" / "__init__.py"))
        with pytest.raises(ClusterError) as raised:
            folder()
        golden(raised)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("built")
    words = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    subprocess.run(words, cwd=REPOSITORY, check=True, capture_output=True)
    return folder


@pytest.mark.processes
class TestBuilt:
    def test_a_wheel_submits_without_a_checkout(self, built: Path, tmp_path: Path) -> None:
        (wheel,) = built.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(tmp_path / "installed")
        (tmp_path / "my.ini").write_text(MINIMAL)
        environment = {**os.environ, "PYTHONPATH": str(tmp_path / "installed")}

        def llmperf(*words: str) -> str:
            command = [sys.executable, "-m", "pytest_llmperf.cli", *words]
            return subprocess.run(
                command, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True
            ).stdout

        assert "#SBATCH --requeue" in llmperf("submit", "my.ini", "--dry-run")
        for path in EXAMPLES:
            assert llmperf("submit", "--example", path.stem) == path.read_text()

    def test_the_source_distribution_has_what_the_wheel_is_built_of(self, built: Path) -> None:
        (source,) = built.glob("*.tar.gz")
        with tarfile.open(source) as archive:
            inside = {name.partition("/")[2] for name in archive.getnames()}
        ours = [path for path in (REPOSITORY / "slurm").rglob("*") if path.is_file()]
        assert {str(path.relative_to(REPOSITORY)) for path in ours} <= inside
