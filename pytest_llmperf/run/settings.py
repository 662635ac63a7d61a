"""Settings: everything that one run was asked for; each field is an option, with its flag, ini value, check and help.

``run/reading.py`` makes them of what a front-end was given. Every start of pytest loads this: it imports little.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_llmperf.run.options import BISECT, CHECK, PYTEST, SCRIPT, TUNE, only, option, switch
from pytest_llmperf.support import user_input

if TYPE_CHECKING:
    from pytest_llmperf.analysis.cost import Price
    from pytest_llmperf.launch.site import SlurmOptions
    from pytest_llmperf.run.findings import Width

#: Launches of a case at most, where fewer do not decide and nobody says otherwise.
MAX_LAUNCHES = 4

#: Nights from one in which a case takes all its steps to the next.
ALL_STEPS = 10

#: The metric of each tolerance that an ini file, or a marker, may set.
TOLERANCES = {"throughput": "tokens_per_second_per_gpu", "memory": "peak_reserved_bytes"}

#: What a site's ini file says of SLURM, each as ``perf_slurm_NAME``.
SLURM_INI = {
    "prefix": "goes before the command on each node, e.g. singularity exec --nv image.sif",
    "modules": "modules to load on each node first",
    "srun": "more options for srun",
    "python": "the Python on the nodes, e.g. of the container (the one that runs pytest)",
    "scratch": "a folder that each node has for itself (its TMPDIR)",
    "cpu_bind": "srun's --cpu-bind (none)",
}

_BOTH, _ALL = only(PYTEST, CHECK), only(PYTEST, CHECK, TUNE, BISECT)
_EVERY = _ALL | only(SCRIPT)
_PYTEST = only(PYTEST)
_HERE = {"help": "where baselines are kept (default: baselines/ here)"}
_KIND = {"help": "only baselines of this machine kind"}
_EACH = {"help": "per launch"}
_IDLE = {"static": "idle", "repeated": True}
_LAUNCHES = {"parse": user_input.count, "expected": "a number of launches, 1 or more", "metavar": "N"}
_GPUS = {"parse": user_input.whole, "expected": "a number of GPUs, 0 (the CPU) or more", "metavar": "N"}
_WIDTH = {"parse": user_input.count, "expected": "a number of GPUs, 1 or more", "metavar": "N"}
_SECONDS = {"parse": user_input.positive, "expected": "a time in seconds above 0", "metavar": "SECONDS"}
_HOURS = {"parse": user_input.positive, "expected": "a number of GPU-hours above 0", "metavar": "GPU_HOURS"}
_NIGHTS = {"parse": user_input.whole, "expected": "a number of nights, 0 or more", "metavar": "NIGHTS"}
_PRICE = {"parse": user_input.positive, "expected": "a price of a GPU-hour, e.g. 2.10", "metavar": "PRICE"}
_CURRENCY = {"parse": user_input.currency, "expected": "a currency, e.g. EUR", "metavar": "NAME"}
_SIZE = {"parse": user_input.size_bytes, "expected": "a size of memory with its unit, e.g. 64GiB", "metavar": "SIZE"}
_ALARMS: dict[str, Any] = {"parse": user_input.positive, "expected": "a number of alarms above 0, e.g. 1"}
_TOLERANCE: dict[str, Any] = {"parse": user_input.tolerance, "expected": user_input.A_WRITTEN_TOLERANCE}
_YES_NO = {"choices": ("yes", "no"), "means": {"yes": True, "no": False}}
_AUTO_NO = {"choices": ("auto", "no"), "means": {"auto": True, "no": False}}


def _no_slurm_options() -> Any:
    from pytest_llmperf.launch.site import SlurmOptions

    return SlurmOptions()


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything this run was asked for. ``help`` says what each is; what it does not say stands below."""

    gpus: int | None = option(
        "--gpus", _EVERY, "GPUs this run may use; 0 = the CPU (gloo); default: all visible GPUs, else 0", **_GPUS
    )
    update: str | None = option("--update-baselines", _BOTH)
    """``new``, ``all``, ``prune`` or ``None``."""
    reason: str = option(
        "--perf-reason", _BOTH, "why; required where an update makes a figure worse", default="", metavar="TEXT"
    )
    baselines: Path = option(
        "--perf-baselines",
        only(PYTEST, check=_HERE, tune=_HERE, bisect=_HERE, stored=_HERE, history=_HERE),
        "where baselines are kept (default: baselines/ under rootdir)",
        default=MISSING,
        path="folder",
        metavar="DIR",
        repeated=True,
    )
    json: Path | None = option(
        "--perf-json", _BOTH, "write every result, machine-readable", path="file", metavar="FILE"
    )
    report: Path | None = option(
        "--perf-report", _PYTEST, "write the run as one page that needs no network", path="file", metavar="FILE.html"
    )
    dry_run: bool = switch(
        "--perf-dry-run",
        _PYTEST,
        "show what would run, in what order, and its GPU-hours; run nothing",
        static="refused",
    )
    parity: bool = switch(
        "--perf-parity",
        _BOTH,
        "compare what each case trains with its plain form first: losses, gradients and updates of a small model",
        static="refused",
        repeated=True,
    )
    loss_curve: bool = switch(
        "--perf-loss-curve",
        _BOTH,
        "compare the losses of each case on a text with those of the same seeds before",
        static="refused",
        repeated=True,
        ini="perf_loss_curve",
    )
    strict: bool = switch(
        "--perf-strict",
        only(PYTEST, check={"help": "also fail on improved, inconclusive or changed cases"}),
        "also fail on improved, inconclusive or changed cases, and on unused baselines",
    )
    against: str = option(
        "--perf-against",
        _PYTEST,
        "compare each case with the same case under this interpreter, or each script with the project at git:REVISION, "
        "in turns on the same GPUs; no baselines",
        default="",
        metavar="PYTHON|git:REVISION",
        static="refused",
        repeated=True,
    )
    start: str = option(
        "--perf-start",
        _ALL,
        "how a launch begins: forked from a process that has imported everything, or by an interpreter of its own "
        "(auto: warm where it can be)",
        default="auto",
        choices=("auto", "warm", "cold"),
        static="idle",
        ini="perf_start",
        ini_help="how a launch begins: auto, warm or cold (auto)",
    )
    overlap: bool = option(
        "--perf-overlap",
        _ALL,
        "whether a launch begins while the processes of the one before still end (auto: warm ones, on this machine)",
        default=True,
        static="idle",
        **_AUTO_NO,
    )
    trace: bool = option(
        "--perf-trace",
        _BOTH,
        "whether each launch traces three steps after those that it times, for exact counts (yes)",
        default=True,
        **_YES_NO,
        **_IDLE,
    )
    calibration: bool = option(
        "--perf-calibration",
        only(PYTEST, CHECK, tune={"default": False, "help": "whether each GPU is calibrated once a day (no)"}),
        "whether each GPU is calibrated once a day, for some seconds inside a launch (auto: where GPUs train)",
        default=True,
        repeated=True,
        ini="perf_calibration",
        ini_help="whether GPUs are calibrated: auto or no (auto)",
        **_AUTO_NO,
    )
    all_steps: int = option(
        "--perf-all-steps",
        _BOTH,
        f"a case takes all its steps once in so many nights; 1: always, 0: only when recorded ({ALL_STEPS})",
        default=ALL_STEPS,
        repeated=True,
        ini="perf_all_steps",
        **_NIGHTS,
    )
    launcher: str = option(
        "--perf-launcher",
        _PYTEST,
        "how torchrun is started: on this machine, or by srun in a SLURM job (auto: in a job, by srun)",
        default="auto",
        choices=("auto", "local", "slurm"),
        **_IDLE,
    )
    resume: bool = switch(
        "--perf-resume",
        _PYTEST,
        "in a SLURM job that was requeued: cases that it concluded before are not run again",
        static="refused",
    )
    budget_gpu_hours: float | None = option(
        "--perf-budget",
        _PYTEST,
        "in a SLURM job: start nothing more once its GPUs were held for so long, requeues included; "
        "with --perf-dry-run anywhere: fail where the cases alone would take more",
        static="refused",
        **_HOURS,
    )
    width_gpus: int | None = option(
        "--perf-width",
        _PYTEST,
        "run only the tests whose widest spec asks for N GPUs (with --gpus 0: ranks on the CPU)",
        static="refused",
        **_WIDTH,
    )
    plan: Path | None = option(
        "--perf-plan",
        _PYTEST,
        "what --perf-dry-run --perf-json wrote of the same tests: --perf-width knows them by it beforehand",
        path="source",
        metavar="FILE",
    )
    static: bool = switch(
        "--perf-static",
        only(PYTEST, check={"flag": "--static"}),
        "judge without a GPU: operators, arithmetic, predicted memory of each case's step; a script's by its tiny form",
    )
    markdown: Path | None = option(
        "--perf-markdown", _PYTEST, "write the run as a page of Markdown", path="file", metavar="FILE"
    )
    price: Price | None = option(
        "--perf-price",
        _PYTEST,
        "price of a GPU-hour; adds cost to reports",
        ini="perf_price",
        ini_help="price of a GPU-hour, e.g. 2.10",
        **_PRICE,
    )
    currency: str | None = option(
        "--perf-currency",
        _PYTEST,
        "of the price (default: EUR)",
        ini="perf_currency",
        ini_help="currency of the price (EUR)",
        **_CURRENCY,
    )
    history: Path | None = option(
        "--perf-history",
        _BOTH | {"report": {"help": "the store of runs before these, for --html, or off (the one to which runs add)"}},
        "the store to which this run adds what its cases took, or off (history.sqlite of the user's state)",
        path="store",
        metavar="FILE|off",
        ini="perf_history",
        ini_help="as --perf-history; a relative path is looked up from the rootdir",
    )
    timeout_seconds: float = option(
        "--perf-timeout",
        only(PYTEST, check=_EACH, bisect=_EACH, script=_EACH, tune=_EACH | {"default": 180.0}),
        "per launch, and for a whole search of perf.max_micro_batch",
        default=1800.0,
        **_SECONDS,
        **_IDLE,
    )
    launches: int = option("--perf-launches", _BOTH, "launches of each case at least", default=1, **_LAUNCHES, **_IDLE)
    max_launches: int = option(
        "--perf-max-launches",
        _BOTH,
        f"launches of a case at most, where fewer do not decide (default: {MAX_LAUNCHES}, or --perf-launches if more)",
        default=MAX_LAUNCHES,
        **_LAUNCHES,
        **_IDLE,
    )
    memory_limit_bytes: int = option(
        "--perf-memory-limit",
        only(PYTEST, tune={"flag": "--memory-limit"}),
        "give each GPU no more memory than this, e.g. 64GiB, as a smaller card has",
        default=0,
        keeps_text=True,
        **_SIZE,
        **_IDLE,
    )
    """Of each rank; 0: all of it."""
    throughput_tolerance: float | None = option(
        ini="perf_throughput_tolerance", ini_help="fraction by which a case may slow down (GPU: 0.02)", **_TOLERANCE
    )
    memory_tolerance: float | None = option(
        ini="perf_memory_tolerance",
        ini_help="fraction by which a case's peak memory may grow (GPU: 0.01)",
        **_TOLERANCE,
    )
    alarms_a_month: float = option(
        default=1.0, ini="perf_alarms_per_month", ini_help="false alarms allowed to a nightly run (1)", **_ALARMS
    )
    machine: str = option(
        "--machine",
        only(TUNE, check=_KIND, bisect=_KIND, stored=_KIND, history={"help": "only on this machine kind"}),
        "a name of your own for this machine kind",
        default="",
        metavar="KIND",
        ini="perf_machine",
        ini_help="your name for this machine kind, instead of the hardware's",
    )
    slurm: SlurmOptions = field(default_factory=_no_slurm_options)
    width: Width | None = None
    """Of which tests alone are run, by ``width_gpus`` and ``plan``; ``None``: all."""
    against_itself: bool = False
    """Whether ``against`` is of the environment that runs pytest, under whatever name."""
    step_summary: Path | None = None
    """Of GitHub Actions: the page of Markdown is added to it, as far as there is room."""

    @property
    def tolerances(self) -> Mapping[str, float]:
        """What the ini file sets, by metric."""
        said = {name: getattr(self, f"{name}_tolerance") for name in TOLERANCES}
        return {TOLERANCES[name]: value for name, value in said.items() if value is not None}

    @property
    def other_revision(self) -> str:
        """The revision of ``--perf-against git:REVISION``; empty where it names an interpreter."""
        return self.against.removeprefix("git:") if self.against.startswith("git:") else ""

    @property
    def launches_nothing(self) -> str:
        """Why this run launches none of its cases; empty where it does."""
        if self.update == "prune":
            return "--update-baselines=prune: nothing is launched"
        return "dry run: nothing is launched" if self.dry_run else ""
