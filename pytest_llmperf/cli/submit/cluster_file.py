"""A cluster file: what `llmperf submit` needs to know of a site, as an ini file with few, known keys."""

from __future__ import annotations

import configparser
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from pytest_llmperf.cli.answer import ClusterError
from pytest_llmperf.cli.left_out_widths import LeftOut, left_out
from pytest_llmperf.cli.submit.reserved_options import (
    RESERVED,
    SBATCH,
    SBATCH_KEYS,
    SBATCH_MERGE,
    reserved_by_sbatch,
    reserved_in,
)
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

#: Words, of which there may be more than a line has.
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


@dataclass(frozen=True)
class ClusterFile:
    """The values of one file, checked; read by section and key."""

    path: Path
    values: Mapping[str, Mapping[str, str]]
    own: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Sections that are of some widths only, by their names: what they say in place of ``[sbatch]``."""
    chosen: str = ""
    """The one of these that is in ``values``."""

    @classmethod
    def read(cls, path: Path) -> ClusterFile:
        """The file at ``path``.

        Raises:
            ClusterError: it cannot be read, or a section, key or value in it is none that is known.
        """
        parser = configparser.ConfigParser(interpolation=None, inline_comment_prefixes=None, strict=True)
        try:
            parser.read_string(path.read_text(encoding="utf-8-sig"), source=str(path))
        except (OSError, UnicodeDecodeError) as error:
            raise ClusterError(f"{path}: not read ({error}); llmperf submit --example has some to start from") from None
        except configparser.Error as error:
            raise ClusterError(f"{path}: not an ini file ({' '.join(str(error).split())})") from None
        for section in parser.sections():
            known = section if _OF_WIDTHS.fullmatch(section) is None else "sbatch"
            _known(path, "section", known, list(KEYS))
            for key in parser[section]:
                _known(path, f"key in [{section}]", key, list(KEYS[known]))
        found = {section: {key: _value(path, parser, section, key) for key in keys} for section, keys in KEYS.items()}
        own = {
            section: {key: _value(path, parser, section, key) for key in parser[section]}
            for section in filter(_OF_WIDTHS.fullmatch, parser.sections())
        }
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

    def words(self, section: str, key: str) -> list[str]:
        """A value as a shell would split it.

        Raises:
            ClusterError: a quote that does not end.
        """
        try:
            return shlex.split(self.text(section, key))
        except ValueError as error:
            raise self.wrong(section, key, f"words as in a shell ({error})") from None

    def count(self, section: str, key: str) -> int:
        """A whole number above 0.

        Raises:
            ClusterError: it is none.
        """
        found = quantities.count(self.text(section, key))
        if found is None:
            raise self.wrong(section, key, "a whole number of at least 1")
        return found

    @property
    def checkout(self) -> Path:
        """The suite's folder.

        Raises:
            ClusterError: it is not there.
        """
        found = self._path("checkout").absolute()
        if not found.is_dir():
            raise self.wrong("suite", "checkout", "a folder that is there, with the suite")
        return found

    @property
    def results(self) -> Path:
        """Where each submission has a folder of its own.

        Raises:
            ClusterError: as for the checkout, which it lies in.
        """
        return self.checkout / self._path("results")

    @property
    def widths(self) -> list[int]:
        """Numbers of GPUs, from wide to narrow.

        Raises:
            ClusterError: something else is among them.
        """
        found = {quantities.count(text) for text in self.text("suite", "gpus").replace(",", " ").split()}
        known = {gpus for gpus in found if gpus is not None}
        if not known or known != found:
            raise self.wrong("suite", "gpus", "numbers of GPUs, e.g. 1 2 4 8")
        return sorted(known, reverse=True)

    @property
    def without(self) -> LeftOut:
        """The widths of tests that this night is not for.

        Raises:
            ClusterError: something else is among them, or what ``gpus`` has too.
        """
        words = self.text("suite", "without").replace(",", " ").split()
        found = left_out(words)
        if found is None:
            raise self.wrong("suite", "without", "numbers of GPUs, or the word wider, e.g. 16 32")
        both = sorted({*self.widths} & found.widths)
        if both:
            raise self.wrong("suite", "without", f"none of gpus, and {both[0]} is in both")
        return found

    @property
    def hours(self) -> float:
        """The time limit of a job.

        Raises:
            ClusterError: SLURM would not take it.
        """
        match = _TIME.fullmatch(self.text("sbatch", "time"))
        hours = 0.0 if match is None else _hours(match["days"], [int(part) for part in match["rest"].split(":")])
        if not hours:  # to SLURM a time of 0 is no limit at all
            raise self.wrong("sbatch", "time", "a time above 0 as sbatch takes it, e.g. 02:00:00 or 1-12")
        return hours

    @property
    def is_local(self) -> bool:
        """Whether the night runs on this machine, without SLURM."""
        return self.text("cluster", "scheduler") == "local"

    @property
    def restarts(self) -> int:
        """How often the job goes on in another start.

        Raises:
            ClusterError: not a whole number.
        """
        found = quantities.whole(self.text("suite", "max_restarts"))
        if found is None:
            raise self.wrong("suite", "max_restarts", "a whole number")
        return found

    @property
    def budget(self) -> float | None:
        """GPU-hours that one submission may cost.

        Raises:
            ClusterError: not a number above 0.
        """
        text = self.text("suite", "budget_gpu_hours")
        if not text:
            return None
        value = quantities.positive(text)
        if value is None:
            raise self.wrong("suite", "budget_gpu_hours", "a number of GPU-hours above 0")
        return value

    def _check(self) -> None:
        _ = self.widths, self.without, self.hours, self.budget, self.restarts, self.count("cluster", "gpus_per_node")
        if self.text("cluster", "cpus_per_node"):
            self.count("cluster", "cpus_per_node")
        for section, key in _LONG:
            if key != "select":  # of pytest's own language
                self.words(section, key)
        self._check_names()
        self._check_options()
        self._check_widths()
        self._check_own()
        for (section, key), known in _CHOICES.items():
            if self.text(section, key) not in known:
                raise self.wrong(section, key, " or ".join(known))
        if self.budget is not None and self.is_local:
            raise self.wrong("suite", "budget_gpu_hours", "none with scheduler = local, where nothing ends the run")
        for section, key in ((section, key) for section, keys in self.values.items() for key in keys):
            if "CHANGE-ME" in self.text(section, key):
                raise self.wrong(section, key, "your site's own value; copy the example and change it")

    def _check_names(self) -> None:
        if _NAME.fullmatch(self.text("cluster", "name")) is None:
            raise self.wrong("cluster", "name", "letters, digits and . _ -, since it names files")
        if "\\" in str(self.results):  # with one in it, SLURM fills in nothing of a log's name
            raise self.wrong("suite", "results", f"a folder whose path, {self.results}, has no backslash")

    def _check_options(self) -> None:
        words = self.words("suite", "options")
        option = reserved_in(words)
        if option is not None:
            raise self.wrong("suite", "options", f"no {option}, {RESERVED[option]}")
        self._check_sbatch()
        if quantities.mail(self.text("suite", "mail")) is None:
            raise self.wrong("suite", "mail", "an address, or several with commas; none begins with -")
        if self.budget is not None and any(word.partition("=")[0] == "--perf-budget" for word in words):
            raise self.wrong("suite", "options", "no --perf-budget, which is each job's share of budget_gpu_hours")

    def _check_sbatch(self) -> None:
        said = {f"--{key}": f"of which [sbatch] {key} has one" for key in SBATCH_KEYS if self._says("sbatch", key)}
        for key, reserved in (("options", {**SBATCH, **said}), ("merge_options", SBATCH_MERGE)):
            words = self.words("sbatch", key)
            if words and not words[0].startswith("-"):
                raise self.wrong("sbatch", key, f"options of sbatch, and {words[0]} is none")
            option = reserved_by_sbatch(words, reserved)
            if option is not None:
                raise self.wrong("sbatch", key, f"no {option}, {reserved[option]}")

    def _says(self, section: str, key: str) -> bool:
        return self.text(section, key) not in ("", "no")

    def _check_own(self) -> None:
        """Each section of some widths is of one of the night's at least, and no width is of two."""
        for section, values in self.own.items():
            covered, others = [width for width in self.widths if _covers(section, width)], {*self.own} - {section}
            both = [other for other in sorted(others) if covered and _covers(other, covered[0])]
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

    def _check_widths(self) -> None:
        per_node = self.count("cluster", "gpus_per_node")
        for width in self.widths:
            if not _fits(width, per_node):
                below = next(each for each in range(width, 0, -1) if _fits(each, per_node))
                above = next(each for each in range(width, 2 * width + 1) if _fits(each, per_node))
                expected = f"the same number on each node, of which each has {per_node} (gpus_per_node); not {width}"
                raise self.wrong("suite", "gpus", f"{expected}, but {below} or {above}")

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
    """Whether a section like ``sbatch 1-2, 8+`` is of ``width``."""
    match = _OF_WIDTHS.fullmatch(section)
    ranges = [_RANGE.fullmatch(word) for word in (match["widths"].replace(",", " ").split() if match else ())]
    if not all(ranges):
        return False
    return any(
        int(found["first"]) <= width and (found["wider"] or width <= int(found["last"] or found["first"]))
        for found in ranges
        if found
    )


def _fits(width: int, per_node: int) -> bool:
    nodes = -(-width // per_node)  # the fewest with so many; a launch puts the same number on each
    return width % nodes == 0


def _hours(days: str | None, parts: list[int]) -> float:
    if days:
        hours, minutes, seconds = [*parts, 0, 0][:3]
        return int(days) * 24 + hours + minutes / 60 + seconds / 3600
    # Minutes, minutes:seconds, hours:minutes:seconds.
    hours, minutes, seconds = {1: [0, *parts, 0], 2: [0, *parts], 3: parts}[len(parts)]
    return hours + minutes / 60 + seconds / 3600


def _value(path: Path, parser: configparser.ConfigParser, section: str, key: str) -> str:
    known = section if section in KEYS else "sbatch"
    default = KEYS[known][key]
    value = parser.get(section, key, fallback=default)
    if value is None:
        raise ClusterError(f"{path}: [{section}] {key} is missing; for a whole file see llmperf submit --example")
    lines = value.strip().splitlines()
    text = " ".join(lines).replace("\t", " ")
    if (len(lines) > 1 and (known, key) not in _LONG) or not text.isprintable():
        raise ClusterError(f"{path}: [{section}] {key} = {text!r}: expected one line of printable text")
    return text


def _known(path: Path, what: str, name: str, known: list[str]) -> None:
    if name not in known:
        raise ClusterError(f"{path}: unknown {what}: {name!r}{hint(name, known)}; known: {', '.join(known)}")
