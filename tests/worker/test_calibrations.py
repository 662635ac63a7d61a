"""Calibrations inside launches: made once, kept, and nothing to the training."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pytest_llmperf import TrainSpec
from pytest_llmperf.records.calibration import BF16_PRODUCT, COPY, FP32_PRODUCT, OF_THE_RUN, UNKEPT, Calibration
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.support import codec
from tests.worker.launching import launched

torch = pytest.importorskip("torch")

from pytest_llmperf.observe import device  # noqa: E402 - they need torch
from pytest_llmperf.observe import reference_work as calibrator  # noqa: E402
from pytest_llmperf.observe.device import Look, disturbances, mean  # noqa: E402
from pytest_llmperf.observe.reference_work import calibrate, calibrated, unsteady  # noqa: E402

pytestmark = [pytest.mark.torchrun, pytest.mark.filterwarnings("ignore")]

CPU = torch.device("cpu")
SPEC = TrainSpec(
    model="llama-tiny",
    sequence_length=16,
    micro_batch_size=2,
    warmup_steps=2,
    min_steps=6,
    steps=8,
)
BOOT, TODAY = "boot", "2026-01-01"


def made_at(launch: Launch) -> list[str]:
    return [rank.calibration.made_at if rank.calibration else "" for rank in launch.ranks]


@pytest.mark.parametrize("gpus", [pytest.param(1, marks=pytest.mark.wide), 2])
def test_the_first_launch_makes_it_and_the_second_has_the_same(tmp_path: Path, gpus: int) -> None:
    spec, folder = replace(SPEC, gpus=gpus), tmp_path / "calibrations"
    plain = launched(spec, tmp_path / "plain")
    first = launched(spec, tmp_path / "first", calibrations=folder)
    second = launched(spec, tmp_path / "second", calibrations=folder)

    assert made_at(plain) == [""] * gpus
    assert made_at(second) == made_at(first)
    assert all(made_at(first))
    works = {"bf16_product", "fp32_product", "copy", *(["all_reduce"] if gpus > 1 else [])}
    assert all(rank.calibration and rank.calibration.seconds.keys() == works for rank in first.ranks)
    assert len(list(folder.iterdir())) == gpus

    # It is told apart from what comes before the steps, and only where it is made.
    # How often each work is repeated is told by three trials, which a busy host takes longer for.
    assert first.phases["calibration"] > 0.05
    assert list(first.phases)[:4] == ["start", "imports", "calibration", "model"]
    assert "calibration" not in {**plain.phases, **second.phases}

    # The training is as it would be without.
    shared = min(len(plain.losses), len(first.losses))
    assert first.losses[:shared] == plain.losses[:shared]
    # A host's memory of two launches that are alike lies up to 11 MiB apart at times.
    assert first.peak_reserved_bytes == pytest.approx(plain.peak_reserved_bytes, abs=16 * 2**20)
    assert codec.read(Launch, json.loads(json.dumps(codec.plain(first)))) == first


def test_launches_of_one_run_share_what_the_cache_cannot_keep(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    cache = tmp_path / "file" / "calibrations"
    first, second = (launched(SPEC, tmp_path / "run" / name, calibrations=cache) for name in ("first", "second"))
    assert made_at(second) == made_at(first) != [""]
    assert "calibration" in first.phases
    assert "calibration" not in second.phases
    assert str(cache) in (tmp_path / "run" / OF_THE_RUN / UNKEPT).read_text()


def test_the_random_numbers_of_the_training_are_untouched() -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    calibrate(CPU)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(("unsteady_times", "attempts"), [(0, 1), (1, 2), (9, 2)])
def test_a_work_that_is_not_steady_is_measured_once_more(
    monkeypatch: pytest.MonkeyPatch, unsteady_times: int, attempts: int
) -> None:
    measured = list[str]()

    def steady(*of: Any) -> list[float]:
        name = of[3]
        measured.append(name)
        swings = name == FP32_PRODUCT and measured.count(name) <= unsteady_times
        return [1.0] * 5 + [1.03 if swings else 1.0] * 5

    monkeypatch.setattr(calibrator, "_steady", steady)
    monkeypatch.setattr(calibrator, "_judged", lambda steady, _: steady)  # as a GPU's are
    trouble = calibrate(CPU).trouble
    assert measured == [BF16_PRODUCT, *[FP32_PRODUCT] * attempts, COPY]
    assert bool(trouble) == (unsteady_times >= attempts)


@pytest.fixture
def products() -> Iterator[Any]:
    """How fp32 products are rounded, as a new process has it, before the test and after it."""

    def reset() -> None:
        matmul.allow_tf32 = False
        if hasattr(matmul, "fp32_precision"):  # since torch 2.9
            torch.backends.fp32_precision = matmul.fp32_precision = "none"

    matmul = torch.backends.cuda.matmul
    reset()
    yield matmul
    reset()


@pytest.mark.parametrize("allowed", [True, False])
def test_fp32_products_are_fp32_and_what_they_were_after_it(
    monkeypatch: pytest.MonkeyPatch, products: Any, allowed: bool
) -> None:
    seen, make = [], calibrator._product

    def product(*of: Any) -> Any:
        seen.append(products.allow_tf32)
        return make(*of)

    monkeypatch.setattr(calibrator, "_product", product)
    products.allow_tf32 = allowed
    calibrate(CPU)
    assert (seen, products.allow_tf32) == ([allowed, False], allowed)


def test_fp32_products_are_so_where_the_older_way_to_ask_is_refused(products: Any) -> None:
    if not hasattr(products, "fp32_precision"):
        pytest.skip("this torch has one way")
    torch.backends.fp32_precision = "tf32"  # as the Trainer sets it
    with device.without_tf32():
        assert products.fp32_precision == "ieee"
    assert products.fp32_precision == "tf32"


class TestKept:
    """What a file of an earlier launch is good for, with work that takes no time."""

    @pytest.fixture(autouse=True)
    def made(self, monkeypatch: pytest.MonkeyPatch) -> list[Calibration]:
        made: list[Calibration] = []
        self.now: dict[str, Any] = {
            "day": TODAY,
            "boot": BOOT,
            "limit": 700.0,
            "versions": {"torch": "1"},
            "trouble": "",
        }

        def make(_device: Any) -> Calibration:
            now = self.now
            one = Calibration(
                made_at=f"{now['day']}T00:00:{len(made):02}Z",
                seconds={"copy": 1.0},
                versions=now["versions"],
                power_limit_watts=now["limit"],
                trouble=now["trouble"],
            )
            made.append(one)
            return one

        monkeypatch.setattr(calibrator, "calibrate", make)
        monkeypatch.setattr(calibrator, "boot_id", lambda: self.now["boot"])
        monkeypatch.setattr(calibrator, "_versions", lambda _: self.now["versions"])
        monkeypatch.setattr(time, "strftime", lambda *_: self.now["day"])
        monkeypatch.setattr(device.GpuSensors, "power_limit_watts", property(lambda _: self.now["limit"]))
        return made

    def test_serves_the_whole_day(self, tmp_path: Path, made: list[Calibration]) -> None:
        assert calibrated(CPU, tmp_path / "new") == calibrated(CPU, tmp_path / "new") == made[0]
        assert len(made) == 1

    @pytest.mark.parametrize(
        "later",
        [{"day": "2026-01-02"}, {"boot": "other"}, {"limit": 600.0}, {"versions": {"torch": "2"}}],
        ids=lambda later: next(iter(later)),
    )
    def test_does_not_serve_what_differs(self, tmp_path: Path, made: list[Calibration], later: dict[str, Any]) -> None:
        calibrated(CPU, tmp_path)
        self.now |= later
        assert calibrated(CPU, tmp_path) == calibrated(CPU, tmp_path) == made[1]
        assert len(made) == 2

    @pytest.mark.parametrize(
        "damage",
        [
            lambda text: text[: len(text) // 2],
            lambda _: "",
            lambda _: "[]",
            lambda _: "[" * 100_000,
            lambda text: text.replace("1.0", "NaN"),
            lambda text: text.replace('"boot"', '"other"'),
            lambda text: text.replace('"made_at"', '"made"'),
        ],
        ids=["cut", "empty", "list", "deep", "nan", "no boot", "no time"],
    )
    def test_a_damaged_file_is_as_none(self, tmp_path: Path, made: list[Calibration], damage: Any) -> None:
        calibrated(CPU, tmp_path)
        (path,) = tmp_path.iterdir()
        path.write_text(damage(path.read_text(encoding="utf-8")), encoding="utf-8")
        assert calibrated(CPU, tmp_path) == calibrated(CPU, tmp_path) == made[1]

    def test_a_folder_that_cannot_be_written_is_no_error(self, tmp_path: Path, made: list[Calibration]) -> None:
        (tmp_path / "file").touch()
        for number in range(2):
            assert calibrated(CPU, tmp_path / "file" / "calibrations") == made[number]

    def test_where_the_folder_cannot_be_written_the_run_keeps_it_and_the_reason(
        self, tmp_path: Path, made: list[Calibration]
    ) -> None:
        (tmp_path / "file").touch()
        folder, of_run = tmp_path / "file" / "calibrations", tmp_path / "run" / "calibrations"
        for _ in range(3):
            assert calibrated(CPU, folder, of_run=of_run) == made[0]
        assert len(made) == 1
        assert (of_run / UNKEPT).read_text() == f"{folder}: Not a directory\n"
        (tmp_path / "file").unlink()
        assert calibrated(CPU, folder) == made[1]

    def test_what_is_kept_is_not_kept_in_the_run(self, tmp_path: Path) -> None:
        calibrated(CPU, tmp_path / "cache", of_run=tmp_path / "run")
        assert not (tmp_path / "run").exists()

    def test_one_with_a_trouble_is_told_and_not_kept(self, tmp_path: Path, made: list[Calibration]) -> None:
        self.now["trouble"] = "2 other process(es) on the GPU"
        troubled = calibrated(CPU, tmp_path)
        assert troubled
        assert troubled.trouble
        assert list(tmp_path.iterdir()) == []

    def test_one_that_is_kept_is_not_announced(self, tmp_path: Path) -> None:
        announced: list[str] = []
        calibrated(CPU, tmp_path, lambda: announced.append("first"))
        calibrated(CPU, tmp_path, lambda: announced.append("second"))
        assert announced == ["first"]


def test_halves_that_differ_are_not_steady() -> None:
    steady = {"copy": [1.0, 1.002, 0.999, 1.001], "bf16_product": [1.0, 1.0, 1.006, 1.006], "fp32_product": [1.0]}
    assert unsteady(steady) == ["bf16_product was not steady: its halves are 0.6 % apart"]


@pytest.mark.parametrize("phase", [0.0, 0.25, 0.5, 0.75])
def test_a_swing_in_the_power_limit_is_steady_and_a_drift_below_it_is_not(phase: float) -> None:
    swing = [1 + 0.02 * math.sin(2 * math.pi * (number / 8.5 + phase)) for number in range(41)]
    assert unsteady({"bf16_product": swing}) == []
    drift = [seconds * (1 + 0.015 * number / 41) for number, seconds in enumerate(swing)]
    assert len(unsteady({"bf16_product": drift})) == 1


def test_an_unsteady_calibration_has_its_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, whose batches these might be."""
    monkeypatch.setattr(calibrator, "_steady", lambda *_: [1.0, 1.1])
    monkeypatch.setattr(calibrator, "_judged", lambda steady, _device: steady)
    assert calibrate(CPU).trouble.startswith("bf16_product was not steady: its halves are 9.5 % apart; fp32_product")


@pytest.mark.parametrize(
    ("reasons", "num_foreign", "told"),
    [
        (0x01 | 0x02 | 0x04, 0, []),
        (0x40, 0, ["clocks were lowered by hardware thermal slowdown"]),
        (0x80 | 0x04, 1, ["1 other process(es) on the GPU", "clocks were lowered by hardware power brake"]),
        (None, 0, []),
    ],
)
def test_what_is_not_the_gpus_own_is_a_trouble(reasons: int | None, num_foreign: int, told: list[str]) -> None:
    quiet = Look(clock_mhz=1500.0, milliwatts=7e5, temperature=60.0, reasons=0x04, num_foreign=0)
    assert disturbances([quiet, replace(quiet, reasons=reasons, num_foreign=num_foreign)]) == told


def test_what_nobody_tells_is_unknown() -> None:
    assert (mean([]), mean([None]), mean([1.0, None, 2.0])) == (0.0, 0.0, 1.5)


@pytest.mark.parametrize(
    ("free_gib", "share", "taken_gib", "has"),
    [(140, 1.0, 0, True), (3, 1.0, 0, False), (140, 0.02, 0, False), (140, 0.1, 11, False)],
)
def test_a_limited_device_has_the_room_that_its_limit_leaves(
    monkeypatch: pytest.MonkeyPatch, free_gib: int, share: float, taken_gib: int, has: bool
) -> None:
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free_gib * 2**30, 140 * 2**30))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _: share)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: taken_gib * 2**30)
    monkeypatch.setattr(calibrator, "_of_all", lambda value, _device: value)
    assert calibrator._has_room(device) == has
