"""Option: what a run, or a command, can be asked for; a front-end's arguments and the reference are made of these.

Those of a run are the fields of ``Settings``, which ``run/reading.py`` makes of what a front-end was given. Every
start of pytest loads this: it imports little."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pytest_llmperf.support import user_input
from pytest_llmperf.support.files import shipped

if TYPE_CHECKING:
    from pytest_llmperf.launch.site import SlurmOptions
    from pytest_llmperf.run.findings import Width

#: The front-ends that make runs; the other commands of ``llmperf`` read what runs have left.
PYTEST, CHECK, TUNE, BISECT, SCRIPT = "pytest", "check", "tune", "bisect", "script"
#: Every command that reads stored baselines; and those of stored runs.
STORED, HISTORY, REPORT = "stored", "history", "report"

#: What options say of themselves, by flag; and options and commands that there were.
WORDS = shipped(__file__, "options.ini")

#: ``--update-baselines`` of pytest.
UPDATES = {
    "--update-baselines": ("all", "record every selected case that ran clean"),
    "--update-baselines=all": ("all", "the same"),
    "--update-baselines=new": ("new", "record only cases that have no baseline"),
}

#: Ways to judge a case that go with no other, by their fields of ``Settings``, and what each does.
ALONE = WORDS["alone"]


class UsageError(Exception):
    """What was asked for cannot be had here: an option, the hardware, the allocation."""


class OptionError(Exception):
    """A value that cannot be used: one line."""


@dataclass(frozen=True, kw_only=True)
class Option:
    flag: str = ""
    """On the command line; empty: only the ini file says it."""
    fronts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Front-ends that have it, and what is different there: ``flag``, ``default``."""
    default: Any = None
    parse: Callable[[str], Any] | None = None
    """From text; ``None``: the text is no such value."""
    expected: str = ""
    """What ``parse`` takes, for people."""
    keeps_text: bool = False
    """Whether it stays as typed, checked, until settings are read: commands that a message offers repeat it."""
    choices: tuple[str, ...] = ()
    means: Mapping[str, Any] = field(default_factory=dict)
    """The values of choices that are not the words."""
    metavar: str = ""
    is_switch: bool = False
    path: Literal["", "file", "folder", "store", "source"] = ""
    """What it names: a file to write, a folder, a file to add to (or ``off``), a file to read."""
    ini: str = ""
    not_with: str = ""
    """Those of ``ALONE`` that refuse it."""
    launches: bool = False
    """Whether it is of launches, and without effect under ``--perf-static``, which makes none."""
    repeated: bool = False
    """Whether the command that a message offers repeats it: it decides how a case is judged."""

    @property
    def dest(self) -> str:
        """Its name in the namespace of argparse, and in pytest's."""
        return "perf_update" if self.flag == "--update-baselines" else self.flag.removeprefix("--").replace("-", "_")

    def at(self, front: str, name: str) -> Any:
        return self.fronts.get(front, {}).get(name, getattr(self, name))

    def typed(self, text: str) -> Any:
        """From ``text``, of an ini file, say; ``OptionError``: it is no such value."""
        if self.choices and text not in self.choices:
            raise OptionError(f"expected {', '.join(self.choices)}{user_input.hint(text, self.choices)}")
        value = text if self.parse is None else self.parse(text)
        if value is None:
            raise OptionError(f"expected {self.expected}")
        return self.means.get(text, value)

    def words(self, front: str) -> dict[str, Any]:
        """For argparse's ``add_argument``. No default: ``None`` says that nobody said anything."""
        default = self.at(front, "default")
        places = [front, "llmperf", PYTEST] if front != PYTEST else [PYTEST]
        texts = (WORDS.get(place, self.flag, fallback="") for place in places)
        text = next(filter(None, texts), "").format(default=default)
        if default and "(" not in text:
            shown = f"{default:g}" if isinstance(default, float) and front != PYTEST else default
            text += f" (default: {shown})"
        words: dict[str, Any] = {"help": text.replace("%", "%%")}
        if self.is_switch:
            return words | {"action": "store_const", "const": True}
        if self.choices:
            words["choices"] = self.choices
        if self.metavar:
            words["metavar"] = self.metavar
        if self.parse is not None:
            words["type"] = user_input.argument(self._checked if self.keeps_text else self.parse, self.expected)
        return words

    def _checked(self, text: str) -> str | None:
        return text if self.parse is not None and self.parse(text) else None


def option(flag: str = "", fronts: Mapping[str, Any] | None = None, *, default: Any = None, **words: Any) -> Any:
    """A field of settings, with its entry of the table. ``default=MISSING``: whoever makes settings says it."""
    unsaid = None if default is MISSING else default
    return field(default=default, metadata={"option": Option(flag=flag, fronts=fronts or {}, default=unsaid, **words)})


def switch(flag: str, fronts: Mapping[str, Any], **words: Any) -> Any:
    """One that is off unless its flag is given, or its ini value is true."""
    return option(flag, fronts, default=False, is_switch=True, **words)


def table(settings: Any) -> Iterator[tuple[str, Option]]:
    return ((each.name, each.metadata["option"]) for each in fields(settings) if "option" in each.metadata)


def is_said(options: Iterable[Option], said: Any) -> bool:
    return any(one.flag and getattr(said, one.dest, None) is not None for one in options)


def only(*fronts: str, **changed: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The front-ends that have an option, and what is different there."""
    return {**{front: {} for front in fronts}, **changed}


def add_to_pytest(parser: Any, options: Iterable[Option]) -> None:
    """Register flags and ini values with pytest's ``parser``."""
    group = parser.getgroup("llmperf", "LLM training performance (pytest-llmperf)")
    for one in options:
        if one.dest == "perf_update":  # spelled out: with an optional value it would take the path that follows it
            for flag, (value, what) in UPDATES.items():
                group.addoption(flag, dest=one.dest, action="store_const", const=value, help=what)
        elif PYTEST in one.fronts:
            group.addoption(one.flag, **one.words(PYTEST))
        if one.ini:
            kind = {"type": "bool", "default": False} if one.is_switch else {"default": ""}
            parser.addini(one.ini, WORDS["ini"].get(one.ini, f"as {one.flag}"), **kind)


def add_to_command(parser: Any, options: Iterable[Option], front: str) -> None:
    """Register the flags of ``front`` with argparse."""
    for one in (one for one in options if front in one.fronts):
        words, flag = one.words(front), one.at(front, "flag")
        if one.dest == "perf_update":
            words |= {"help": "record what ran clean; new: only what has no baseline", "choices": ("all", "new")}
            words |= {"nargs": "?", "const": "all"}
        elif one.path == "folder":  # who reads it without settings has a path
            words |= {"type": _folder, "default": Path(one.at(front, "default") or "baselines")}
        parser.add_argument(flag, dest=one.dest, **words)


def _folder(text: str) -> Path:
    if why := why_no_folder(text):
        raise ArgumentTypeError(why)
    return Path(text)


def why_no_folder(text: str | Path) -> str:
    """Why this can be no folder of baselines; empty where it can, or is not there yet."""
    if text == "":  # a shell's variable that is not set
        return "'': expected a path"
    is_file = Path(text).exists() and not Path(text).is_dir()
    return f"{text}: it is a file; name the folder that holds the baselines" if is_file else ""


def instead(name: str, known: Iterable[str], command: str = "") -> str:
    """What to use in place of ``name``, which is unknown, in brackets; empty where nobody can tell."""
    gone = WORDS["removed"].get(f"{command} {name}") or WORDS["removed"].get(name)
    return f" (removed; {gone})" if gone else user_input.hint(name, known)


def meant(words: Iterable[str], known: Iterable[str], command: str = "") -> str:
    """The same of the first option among ``words`` of which it can be told."""
    options, known = [word.partition("=")[0] for word in words if word.startswith("--")], [*known]
    return next(filter(None, (instead(option, known, command) for option in options)), "")


def refuse_unknown_update(words: Iterable[object]) -> None:
    """Say what ``--update-baselines=`` takes in pytest; argparse would only say that it ignores the value."""
    flag, known = "--update-baselines=", ("new", "all")
    for word in map(str, words):
        value = word.removeprefix(flag)
        if word.startswith(flag) and value not in known:
            raise OptionError(f"{flag}{value}: expected {', '.join(known)}{instead(value, known)}")


# Everything that one run can be asked for.

#: Launches of a case at most, where fewer do not decide and nobody says otherwise.
MAX_LAUNCHES = 4

#: Nights from one in which a case takes all its steps to the next.
ALL_STEPS = 10

#: The metric of each tolerance that an ini file, or a marker, may set.
TOLERANCES = {"throughput": "tokens_per_second_per_gpu", "memory": "peak_reserved_bytes"}

#: What a site's ini file says of SLURM, each as ``perf_slurm_NAME``.
SLURM_INI = WORDS["slurm"]

_BOTH, _ALL = only(PYTEST, CHECK), only(PYTEST, CHECK, TUNE, BISECT)
_EVERY = _ALL | only(SCRIPT)
_PYTEST = only(PYTEST)
_IDLE: dict[str, Any] = {"launches": True, "repeated": True}
_LAUNCHES: dict[str, Any] = {"parse": user_input.count, "expected": "a number of launches, 1 or more", "metavar": "N"}
_LAUNCHES |= _IDLE
_GPUS = {"parse": user_input.whole, "expected": "a number of GPUs, 0 (the CPU) or more", "metavar": "N"}
_WIDTH = {"parse": user_input.count, "expected": "a number of GPUs, 1 or more", "metavar": "N"}
_SECONDS = {"parse": user_input.positive, "expected": "a time in seconds above 0", "metavar": "SECONDS"}
_MINUTES = {"parse": user_input.minutes, "expected": user_input.A_TIME, "metavar": "MINUTES"}
_NIGHTS = {"parse": user_input.whole, "expected": "a number of nights, 0 or more", "metavar": "NIGHTS"}
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
    """Everything this run was asked for. ``options.ini`` says what each is; what it does not say stands below."""

    gpus: int | None = option("--gpus", _EVERY, **_GPUS)
    update: str | None = option("--update-baselines", _BOTH, not_with="against soak_minutes")
    """``new``, ``all`` or ``None``."""
    reason: str = option("--perf-reason", _BOTH, default="", metavar="TEXT")
    baselines: Path = option(
        "--perf-baselines", _ALL | only(STORED, HISTORY), default=MISSING, path="folder", metavar="DIR", repeated=True
    )
    json: Path | None = option("--perf-json", _BOTH, path="file", metavar="FILE")
    report: Path | None = option("--perf-report", _PYTEST, path="file", metavar="FILE.html")
    dry_run: bool = switch("--perf-dry-run", _PYTEST, not_with="static")
    parity: bool = switch("--perf-parity", _BOTH, not_with="static soak_minutes", repeated=True)
    soak_minutes: float | None = option("--perf-soak", _BOTH, not_with="static", repeated=True, **_MINUTES)
    strict: bool = switch("--perf-strict", _BOTH)
    against: str = option(
        "--perf-against",
        _PYTEST,
        default="",
        metavar="PYTHON|git:REVISION",
        not_with="static soak_minutes",
        repeated=True,
    )
    start: str = option(
        "--perf-start", _ALL, default="auto", choices=("auto", "warm", "cold"), launches=True, ini="perf_start"
    )
    overlap: bool = option("--perf-overlap", _ALL, default=True, launches=True, **_AUTO_NO)
    trace: bool = option("--perf-trace", _BOTH, default=True, **_YES_NO, **_IDLE)
    calibration: bool = option(
        "--perf-calibration",
        _BOTH | only(tune={"default": False}),
        default=True,
        repeated=True,
        ini="perf_calibration",
        **_AUTO_NO,
    )
    all_steps: int = option(
        "--perf-all-steps",
        _BOTH,
        default=ALL_STEPS,
        not_with="soak_minutes",
        repeated=True,
        ini="perf_all_steps",
        **_NIGHTS,
    )
    launcher: str = option("--perf-launcher", _PYTEST, default="auto", choices=("auto", "local", "slurm"), **_IDLE)
    resume: bool = switch("--perf-resume", _PYTEST, not_with="static")
    width_gpus: int | None = option("--perf-width", _PYTEST, not_with="static", **_WIDTH)
    plan: Path | None = option("--perf-plan", _PYTEST, path="source", metavar="FILE")
    static: bool = switch("--perf-static", only(PYTEST, check={"flag": "--static"}))
    markdown: Path | None = option("--perf-markdown", _PYTEST, path="file", metavar="FILE")
    history: Path | None = option(
        "--perf-history", _BOTH | only(REPORT), path="store", metavar="FILE|off", ini="perf_history"
    )
    timeout_seconds: float = option(
        "--perf-timeout", _EVERY | only(tune={"default": 180.0}), default=1800.0, **_SECONDS, **_IDLE
    )
    launches: int = option("--perf-launches", _BOTH, default=1, not_with="soak_minutes", **_LAUNCHES)
    max_launches: int = option("--perf-max-launches", _BOTH, default=MAX_LAUNCHES, **_LAUNCHES)
    memory_limit_bytes: int = option(
        "--perf-memory-limit",
        only(PYTEST, tune={"flag": "--memory-limit"}),
        default=0,
        keeps_text=True,
        **_SIZE,
        **_IDLE,
    )
    """Of each rank; 0: all of it."""
    throughput_tolerance: float | None = option(ini="perf_throughput_tolerance", **_TOLERANCE)
    memory_tolerance: float | None = option(ini="perf_memory_tolerance", **_TOLERANCE)
    alarms_a_month: float = option(default=1.0, ini="perf_alarms_per_month", **_ALARMS)
    machine: str = option(
        "--machine", only(CHECK, TUNE, BISECT, STORED, HISTORY), default="", metavar="KIND", ini="perf_machine"
    )
    slurm: SlurmOptions = field(default_factory=_no_slurm_options)
    width: Width | None = None
    """Of which tests alone are run, by ``width_gpus`` and ``plan``; ``None``: all."""
    against_itself: bool = False
    """Whether ``against`` is of the environment that runs pytest, under whatever name."""

    @property
    def tolerances(self) -> Mapping[str, float]:
        """What the ini file sets, by metric."""
        said = {name: getattr(self, f"{name}_tolerance") for name in TOLERANCES}
        return {TOLERANCES[name]: value for name, value in said.items() if value is not None}

    @property
    def other_revision(self) -> str:
        """The revision of ``--perf-against git:REVISION``; empty where it names an interpreter."""
        return self.against.removeprefix("git:") if self.against.startswith("git:") else ""
