"""A cluster file: what `llmperf submit` needs to know of a site, as an ini file with few, known keys."""

from __future__ import annotations

import configparser
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from pytest_llmperf.cli.answer import ClusterError
from pytest_llmperf.cli.night.night_log import NIGHTS_FILE
from pytest_llmperf.cli.night.unjudged import LeftOut, left_out
from pytest_llmperf.support import quantities
from pytest_llmperf.support.suggestions import hint

#: Every key with its default; ``None``: it has to be there.
KEYS: Mapping[str, Mapping[str, str | None]] = {
    "cluster": {
        "name": "llmperf-nightly",
        "scheduler": "slurm",
        "gpus_per_node": None,
        "cpus_per_node": "",
        "on_cpu": "no",
    },
    "sbatch": {
        **dict.fromkeys(("account", "partition", "qos", "constraint", "gres"), ""),
        "time": "01:00:00",
        "exclusive": "no",
        "options": "",
        "merge_options": "",
    },
    "launch": dict.fromkeys(("modules", "prefix", "srun", "python", "scratch", "cpu_bind"), ""),
    "suite": {
        "gpus": None,
        "without": "",
        "mode": "packed",
        "select": "",
        "options": "perf_tests --perf-strict",
        "checkout": ".",
        "results": ".llmperf/nightly",
        "python": sys.executable,
        "check_python": "yes",
        "max_restarts": "2",
        "budget_gpu_hours": "",
        "mail": "",
    },
}

_CHOICES = {
    ("cluster", "scheduler"): ("slurm", "local"),
    ("cluster", "on_cpu"): ("yes", "no"),
    ("sbatch", "exclusive"): ("yes", "no"),
    ("suite", "mode"): ("packed", "array"),
    ("suite", "check_python"): ("yes", "no"),
}

#: Words, which may take more than a line.
_LONG = (
    *(("sbatch", "options"), ("sbatch", "merge_options"), ("suite", "gpus"), ("suite", "select"), ("suite", "options")),
    *(("launch", "modules"), ("launch", "prefix"), ("launch", "srun")),
)

# It names files, and is a word of sbatch's and of a mail's.
_NAME = re.compile(r"[\w.-]+")
# [sbatch 1-2], [sbatch 4 8], [sbatch 16+]: values of these widths.
_OF_WIDTHS = re.compile(r"sbatch\s+(?P<widths>.+)")
_RANGE = re.compile(r"(?P<first>[0-9]{1,9})(?:-(?P<last>[0-9]{1,9})|(?P<wider>\+))?")
_TIME = re.compile(r"(?:(?P<days>[0-9]{1,6})-)?(?P<rest>[0-9]{1,9}(?::[0-9]{1,6}){0,2})")

_Value = TypeVar("_Value")


@dataclass(frozen=True)
class ClusterFile:
    """The values of one file, read by section and key; each raises ``ClusterError`` where it cannot serve."""

    path: Path
    values: Mapping[str, Mapping[str, str]]
    own: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Sections for some widths only, by their names: what they say in place of ``[sbatch]``."""
    chosen: str = ""
    """The one of these that is in ``values``."""

    @classmethod
    def read(cls, path: Path) -> ClusterFile:
        """The file at ``path``, checked.

        Raises:
            ClusterError: it cannot be read, or a section, key or value in it is unknown or cannot serve.
        """
        parser = configparser.ConfigParser(interpolation=None, inline_comment_prefixes=None, strict=True)
        try:
            parser.read_string(path.read_text(encoding="utf-8-sig"), source=str(path))
        except (OSError, UnicodeDecodeError) as error:
            raise ClusterError(f"{path}: not read ({error}); llmperf submit --example has some to start from") from None
        except configparser.Error as error:
            raise ClusterError(f"{path}: not an ini file ({' '.join(str(error).split())})") from None
        of_widths = [section for section in parser.sections() if _OF_WIDTHS.fullmatch(section)]
        for section in parser.sections():
            known = "sbatch" if section in of_widths else section
            _refuse_unknown(path, "section", known, list(KEYS))
            for key in parser[section]:
                _refuse_unknown(path, f"key in [{section}]", key, list(KEYS[known]))
        found = {section: {key: _value(path, parser, section, key) for key in keys} for section, keys in KEYS.items()}
        own = {section: {key: _value(path, parser, section, key) for key in parser[section]} for section in of_widths}
        file = cls(path, found, own)
        file._check()
        for width in file.widths if own else ():
            file.at(width)._check()  # noqa: SLF001 - of this class
        return file

    def at(self, width: int) -> ClusterFile:
        """What the file says of a job of this width."""
        chosen = next((section for section in self.own if _covers(section, width)), "")
        values = {**self.values, "sbatch": {**self.values["sbatch"], **self.own.get(chosen, {})}}
        return replace(self, values=values, chosen=chosen)

    def text(self, section: str, key: str) -> str:
        return self.values[section][key]

    def says(self, section: str, key: str) -> bool:
        """Whether a key that is ``yes`` or ``no`` is ``yes``."""
        return self.text(section, key) == "yes"

    def words(self, section: str, key: str) -> list[str]:
        """A value as a shell would split it."""
        try:
            return shlex.split(self.text(section, key))
        except ValueError as error:
            raise self.wrong(section, key, f"words as in a shell ({error})") from None

    def count(self, section: str, key: str) -> int:
        """A whole number above 0."""
        return self._parsed(section, key, quantities.count, "a whole number of at least 1")

    def _parsed(self, section: str, key: str, parse: Callable[[str], _Value | None], expected: str) -> _Value:
        found = parse(self.text(section, key))
        if found is None:
            raise self.wrong(section, key, expected)
        return found

    @property
    def checkout(self) -> Path:
        """The suite's folder, which is there."""
        found = self._path("checkout").absolute()
        if not found.is_dir():
            raise self.wrong("suite", "checkout", "a folder that is there, with the suite")
        return found

    @property
    def results(self) -> Path:
        """Where each submission has a folder of its own."""
        return self.checkout / self._path("results")

    @property
    def nights_file(self) -> Path:
        """Beside those folders: a line for each night that was submitted, and one for each that was merged."""
        return self.results / NIGHTS_FILE

    @property
    def widths(self) -> list[int]:
        """Numbers of GPUs, from wide to narrow."""
        found = {quantities.count(text) for text in self._listed("gpus")}
        known = {gpus for gpus in found if gpus is not None}
        if not known or known != found:
            raise self.wrong("suite", "gpus", "numbers of GPUs, e.g. 1 2 4 8")
        return sorted(known, reverse=True)

    @property
    def left_out(self) -> list[str]:
        """The words of ``without``."""
        return self._listed("without")

    @property
    def without(self) -> LeftOut:
        """The widths of tests that this night is not for; none of them is in ``gpus``."""
        found = left_out(self.left_out)
        if found is None:
            raise self.wrong("suite", "without", "numbers of GPUs, or the word wider, e.g. 16 32")
        both = sorted({*self.widths} & found.widths)
        if both:
            raise self.wrong("suite", "without", f"none of gpus, and {both[0]} is in both")
        return found

    @property
    def hours(self) -> float:
        """The time limit of a job; 0, which is no limit to SLURM, is refused."""
        return self._parsed("sbatch", "time", _hours, "a time above 0 as sbatch takes it, e.g. 02:00:00 or 1-12")

    @property
    def is_local(self) -> bool:
        """Whether the night runs on this machine, without SLURM."""
        return self.text("cluster", "scheduler") == "local"

    @property
    def on_cpu(self) -> bool:
        return self.says("cluster", "on_cpu")

    @property
    def restarts(self) -> int:
        """How often the job goes on in another start."""
        return self._parsed("suite", "max_restarts", quantities.whole, "a whole number")

    @property
    def budget(self) -> float | None:
        """GPU-hours that one submission may cost."""
        key = "budget_gpu_hours"
        has_one = bool(self.text("suite", key))
        return self._parsed("suite", key, quantities.positive, "a number of GPU-hours above 0") if has_one else None

    def _check(self) -> None:
        _ = self.widths, self.without, self.hours, self.budget, self.restarts, self.count("cluster", "gpus_per_node")
        if self.text("cluster", "cpus_per_node"):
            self.count("cluster", "cpus_per_node")
        for section, key in _LONG:
            if key != "select":  # of pytest's own language
                self.words(section, key)
        if _NAME.fullmatch(self.text("cluster", "name")) is None:
            raise self.wrong("cluster", "name", "letters, digits and . _ -, since it names files")
        if "\\" in str(self.results):  # with one in it, SLURM fills in nothing of a log's name
            raise self.wrong("suite", "results", f"a folder whose path, {self.results}, has no backslash")
        self._check_options()
        self._check_widths()
        self._check_choices()
        for section, key in ((section, key) for section, keys in self.values.items() for key in keys):
            if "CHANGE-ME" in self.text(section, key):
                raise self.wrong(section, key, "your site's own value; copy the example and change it")

    def _check_choices(self) -> None:
        for (section, key), known in _CHOICES.items():
            if self.text(section, key) not in known:
                raise self.wrong(section, key, " or ".join(known))
        if self.budget is not None and self.is_local:
            raise self.wrong("suite", "budget_gpu_hours", "none with scheduler = local, where nothing ends the run")

    def _check_options(self) -> None:
        words = self.words("suite", "options")
        if option := reserved_in(words):
            raise self.wrong("suite", "options", f"no {option}, {RESERVED[option]}")
        one_each = [key for key in _SBATCH_KEYS if self.text("sbatch", key) not in ("", "no")]
        said = {f"--{key}": f"of which [sbatch] {key} has one" for key in one_each}
        for key, reserved in (("options", {**_SBATCH, **said}), ("merge_options", _SBATCH_MERGE)):
            given = self.words("sbatch", key)
            if given and not given[0].startswith("-"):
                raise self.wrong("sbatch", key, f"options of sbatch, and {given[0]} is none")
            if option := _reserved_by_sbatch(given, reserved):
                raise self.wrong("sbatch", key, f"no {option}, {reserved[option]}")
        self._parsed("suite", "mail", quantities.mail, "an address, or several with commas; none begins with -")
        if self.budget is not None and any(word.partition("=")[0] == "--perf-budget" for word in words):
            raise self.wrong("suite", "options", "no --perf-budget, which is each job's share of budget_gpu_hours")

    def _check_widths(self) -> None:
        """A launch puts the same number of ranks on each node; a section of widths is for one of the night's at least.

        No width is in two such sections.
        """
        per_node = self.count("cluster", "gpus_per_node")
        for width in (width for width in self.widths if not _fits(width, per_node)):
            below = next(each for each in range(width, 0, -1) if _fits(each, per_node))
            above = next(each for each in range(width, 2 * width + 1) if _fits(each, per_node))
            expected = f"the same number on each node, of which each has {per_node} (gpus_per_node); not {width}"
            raise self.wrong("suite", "gpus", f"{expected}, but {below} or {above}")
        for section, values in self.own.items():
            covered = [width for width in self.widths if _covers(section, width)]
            both = [other for other in sorted({*self.own} - {section}) if covered and _covers(other, covered[0])]
            expected = ""
            if self.is_local or self.text("suite", "mode") != "array":
                expected = "mode = array, where widths have jobs of their own"
            elif "merge_options" in values:
                expected = "merge_options in [sbatch], since one job merges all widths"
            elif not covered:
                have = self.text("suite", "gpus")
                expected = f"a width of [suite] gpus = {have}, as [sbatch 1-2], [sbatch 4] or [sbatch 8+]"
            elif both:
                expected = f"{covered[0]} GPU(s) in one section, not in [{both[0]}] too"
            if expected:
                raise ClusterError(f"{self.path}: [{section}]: expected {expected}")

    def _listed(self, key: str) -> list[str]:
        return self.text("suite", key).replace(",", " ").split()

    def _path(self, key: str) -> Path:
        try:
            return Path(self.text("suite", key)).expanduser()
        except RuntimeError:
            raise self.wrong("suite", key, "a folder, in the home folder of a user that is known") from None

    def wrong(self, section: str, key: str, expected: str) -> ClusterError:
        """Why a value cannot serve, to be raised."""
        where = self.chosen if section == "sbatch" and key in self.own.get(self.chosen, {}) else section
        return ClusterError(f"{self.path}: [{where}] {key} = {self.text(section, key)}: expected {expected}")


def _covers(section: str, width: int) -> bool:
    """Whether a section like ``sbatch 1-2, 8+`` is for ``width``."""
    match = _OF_WIDTHS.fullmatch(section)
    ranges = [_RANGE.fullmatch(word) for word in (match["widths"].replace(",", " ").split() if match else ())]
    return all(ranges) and any(
        int(found["first"]) <= width and (found["wider"] or width <= int(found["last"] or found["first"]))
        for found in filter(None, ranges)
    )


def _fits(width: int, per_node: int) -> bool:
    return width % -(-width // per_node) == 0  # by the fewest nodes with so many


def _hours(text: str) -> float | None:
    """Minutes, minutes:seconds, hours:minutes:seconds; days- before hours, hours:minutes, hours:minutes:seconds."""
    match = _TIME.fullmatch(text)
    if match is None:
        return None
    parts = [int(part) for part in match["rest"].split(":")]
    if match["days"]:
        hours, minutes, seconds = [*parts, 0, 0][:3]
    else:
        hours, minutes, seconds = {1: [0, *parts, 0], 2: [0, *parts], 3: parts}[len(parts)]
    return int(match["days"] or 0) * 24 + hours + minutes / 60 + seconds / 3600 or None


def _value(path: Path, parser: configparser.ConfigParser, section: str, key: str) -> str:
    known = section if section in KEYS else "sbatch"
    value = parser.get(section, key, fallback=KEYS[known][key])
    if value is None:
        raise ClusterError(f"{path}: [{section}] {key} is missing; for a whole file see llmperf submit --example")
    lines = value.strip().splitlines()
    text = " ".join(lines).replace("\t", " ")
    if (len(lines) > 1 and (known, key) not in _LONG) or not text.isprintable():
        raise ClusterError(f"{path}: [{section}] {key} = {text!r}: expected one line of printable text")
    return text


def _refuse_unknown(path: Path, what: str, name: str, known: list[str]) -> None:
    if name not in known:
        raise ClusterError(f"{path}: unknown {what}: {name!r}{hint(name, known)}; known: {', '.join(known)}")


# Options that submit gives pytest or sbatch itself. Said twice, only one would count, without a word.


_JOB = "which the nightly job gives pytest itself"

#: Of pytest, each with what says it instead.
RESERVED: Mapping[str, str] = {
    "-k": "of which pytest knows the last alone; say it as [suite] select",
    "--gpus": "which the nightly job gives pytest for each width; say them as [suite] gpus",
    **dict.fromkeys(("--perf-json", "--perf-resume", "--perf-width", "--perf-plan"), _JOB),
    "--perf-dry-run": "of which no night has results; see llmperf submit --dry-run",
}
# Of pytest and pytest-xdist: after these the rest of a word is the value.
_SHORT_WITH_VALUE = "cmnoprW"

_SUBMITS_NONE = ("--wrap", "--test-only", "--help", "--usage", "--version")
# Of sbatch, for each job.
_SBATCH: Mapping[str, str] = {
    "--time": "say it as [sbatch] time",
    "--array": "say it as [suite] mode",
    "--job-name": "say it as [cluster] name",
    **dict.fromkeys(("--nodes", "--ntasks", "--ntasks-per-node"), "which follow from [suite] gpus and gpus_per_node"),
    **dict.fromkeys(("--output", "--error", "--open-mode"), "since logs lie in the folder of [suite] results"),
    **dict.fromkeys(("--requeue", "--no-requeue"), "say how often it starts as [suite] max_restarts"),
    **dict.fromkeys(("--signal", "--parsable", "--dependency", "--input"), "which submit gives sbatch itself"),
    **dict.fromkeys(
        ("--gpus", "--gpus-per-node", "--ntasks-per-gpu"), "which follow from [suite] gpus; see [sbatch] gres"
    ),
    "--hold": "with which no night begins",
    "--wait": "say it as llmperf submit --wait",
    **dict.fromkeys(_SUBMITS_NONE, "with which sbatch submits no job of this night"),
}
# Where a key of the file says the same.
_SBATCH_KEYS = ("account", "partition", "qos", "constraint", "gres", "exclusive")
# For the job that merges: what else submit gives it may be said otherwise.
_SBATCH_MERGE: Mapping[str, str] = {
    **{option: _SBATCH[option] for option in (*_SUBMITS_NONE, "--parsable")},
    "--dependency": "which makes it wait for the night's jobs",
    **dict.fromkeys(("--array", "--wait"), "since it is one job that nobody waits for"),
}
_SBATCH_SHORT = dict(
    word.split("=")
    for word in (
        "t=--time a=--array J=--job-name N=--nodes n=--ntasks o=--output e=--error W=--wait h=--help u=--usage "
        "V=--version d=--dependency A=--account p=--partition q=--qos C=--constraint"
    ).split()
)
# The short options of sbatch after which the rest of a word is the value.
_SBATCH_WITH_VALUE = "aAbBcCdDeFGiJLmMnNopPqStUwxZ"


def _reserved_by_sbatch(words: Sequence[str], reserved: Mapping[str, str]) -> str:
    """The first of ``words`` that is ``reserved``, in full, short or shortened; empty: none is."""
    for word in words:
        name = word.partition("=")[0]
        # sbatch takes the beginning of a name for the whole.
        is_long = name.startswith("--") and name != "--"
        found = next((option for option in reserved if is_long and option.startswith(name)), "")
        if not name.startswith("--"):
            found = _short(word, {letter: option for letter, option in _SBATCH_SHORT.items() if option in reserved})
        if found:
            return found
    return ""


def reserved_in(words: Sequence[str]) -> str:
    """The first of ``words`` that is reserved, however pytest lets it be written; empty: none is."""
    letters = {option[1]: option for option in RESERVED if not option.startswith("--")}
    for word in words:
        if word == "--":  # what follows are paths
            return ""
        name, _, value = word.removeprefix("-o").removeprefix("--override-ini=").lstrip("=").partition("=")
        if name == "addopts":
            try:
                inner = reserved_in(shlex.split(value))
            except ValueError:
                inner = reserved_in(value.split())
            if inner:
                return inner
        option = word.partition("=")[0] if word.startswith("--") else _short(word, letters, _SHORT_WITH_VALUE)
        if option in RESERVED:
            return option
    return ""


def _short(word: str, letters: Mapping[str, str], with_value: str = _SBATCH_WITH_VALUE) -> str:
    """The option of ``letters`` in ``-k``, ``-kx``, ``-k=x`` or ``-vk``; empty where there is none."""
    for letter in word[1:] if word.startswith("-") else "":
        if letter in letters:
            return letters[letter]
        if letter in with_value:
            return ""
    return ""
