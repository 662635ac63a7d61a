"""A cluster file: what `llmperf submit` needs to know of a site, as an ini file with few, known keys."""

from __future__ import annotations

import configparser
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from pytest_llmperf.cli.answer import ClusterError
from pytest_llmperf.cli.night_tests import LeftOut, left_out
from pytest_llmperf.run.options import instead
from pytest_llmperf.support import user_input
from pytest_llmperf.support.files import shipped

# It names files, and is a word of sbatch's and of a mail's.
_NAME = re.compile(r"[\w.-]+")
# [sbatch 1-2], [sbatch 4 8], [sbatch 16+]: values of these widths.
_OF_WIDTHS = re.compile(r"sbatch\s+(?P<widths>.+)")
_RANGE = re.compile(r"(?P<first>[0-9]{1,9})(?:-(?P<last>[0-9]{1,9})|(?P<wider>\+))?")
_TIME = re.compile(r"(?:(?P<days>[0-9]{1,6})-)?(?P<rest>[0-9]{1,9}(?::[0-9]{1,6}){0,2})")


def _listed(text: str) -> list[str]:
    return text.replace(",", " ").split()


def _widths(text: str) -> list[int] | None:
    found = {user_input.count(word) for word in _listed(text)}
    return None if not found or None in found else sorted((each for each in found if each), reverse=True)


def _hours(text: str) -> float | None:
    """``[days-]hours:minutes:seconds`` as SLURM reads fewer of them; ``None``, which is no limit to it, of 0."""
    if (match := _TIME.fullmatch(text)) is None:
        return None
    parts = [int(part) for part in match["rest"].split(":")]
    if match["days"]:
        hours, minutes, seconds = [*parts, 0, 0][:3]
    else:
        hours, minutes, seconds = {1: [0, *parts, 0], 2: [0, *parts], 3: parts}[len(parts)]
    return int(match["days"] or 0) * 24 + hours + minutes / 60 + seconds / 3600 or None


def _folder(text: str) -> Path | None:
    try:
        return Path(text).expanduser()
    except RuntimeError:
        return None


class Key(NamedTuple):
    default: str | None = ""
    """``None``: it has to be there."""
    parse: Callable[[str], Any] = str
    """Its value; ``None``, or a ValueError that says more: it cannot serve."""
    expected: str = ""
    is_long: bool = False
    """Whether it may take more than a line."""
    optional: bool = False
    """Whether it may be empty, which is ``None``."""


def _switch(default: str) -> Key:
    return Key(default, {"yes": True, "no": False}.get, "yes or no")


_WORDS = Key("", shlex.split, "words as in a shell", is_long=True)
_COUNT = Key(None, user_input.count, "a whole number of at least 1")
_FOLDER = Key(".", _folder, "a folder, in the home folder of a user that is known")
_AN_ADDRESS = "an address, or several with commas; none begins with -"
# Where a key says the same as an option of sbatch.
_SBATCH_KEYS = ("account", "partition", "qos", "constraint", "gres")

KEYS: Mapping[str, Mapping[str, Key]] = {
    "cluster": {
        "name": Key("llmperf-nightly", _NAME.fullmatch, "letters, digits and . _ -, since it names files"),
        "gpus_per_node": _COUNT,
        "cpus_per_node": _COUNT._replace(default="", optional=True),
        "on_cpu": _switch("no"),
    },
    "sbatch": {
        **dict.fromkeys(_SBATCH_KEYS, Key()),
        "time": Key("01:00:00", _hours, "a time above 0 as sbatch takes it, e.g. 02:00:00 or 1-12"),
        "exclusive": _switch("no"),
        "options": _WORDS,
        "merge_options": _WORDS,
    },
    "launch": {
        **dict.fromkeys(("modules", "prefix", "srun"), _WORDS),
        **dict.fromkeys(("python", "scratch", "cpu_bind"), Key()),
    },
    "suite": {
        "gpus": Key(None, _widths, "numbers of GPUs, e.g. 1 2 4 8", is_long=True),
        "without": Key("", lambda text: left_out(_listed(text)), "numbers of GPUs, or the word wider, e.g. 16 32"),
        "mode": Key("packed", {"packed": "packed", "array": "array"}.get, "packed or array"),
        "select": Key(is_long=True),  # of pytest's own language
        "options": _WORDS._replace(default="perf_tests --perf-strict"),
        "checkout": _FOLDER,
        "results": _FOLDER._replace(default=".llmperf/nightly"),
        "python": Key(sys.executable),
        "check_python": _switch("yes"),
        "max_restarts": Key("2", user_input.whole, "a whole number"),
        "budget_gpu_hours": Key("", user_input.positive, "a number of GPU-hours above 0", optional=True),
        "mail": Key("", user_input.mail, _AN_ADDRESS),
    },
}


@dataclass(frozen=True)
class ClusterFile:
    """The values of one file, read by section and key; each raises ``ClusterError`` where it cannot serve."""

    path: Path
    values: Mapping[str, Mapping[str, str]]
    own: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Sections for some widths only, by their names: what they say in place of ``[sbatch]``."""
    chosen: str = ""

    @classmethod
    def read(cls, path: Path) -> ClusterFile:
        """The file at ``path``, with no unknown section or key, and no value that cannot serve."""
        parser = configparser.ConfigParser(interpolation=None, inline_comment_prefixes=None, strict=True)
        try:
            parser.read_string(path.read_text(encoding="utf-8-sig"), source=str(path))
        except (OSError, UnicodeDecodeError) as error:
            raise ClusterError(f"{path}: not read ({error}); llmperf submit --example has some to start from") from None
        except configparser.Error as error:
            raise ClusterError(f"{path}: not an ini file ({' '.join(str(error).split())})") from None
        own: dict[str, Mapping[str, str]] = {}
        for section in parser.sections():
            is_of_widths = _OF_WIDTHS.fullmatch(section) is not None
            known = "sbatch" if is_of_widths else section
            _refuse_unknown(path, "section", known, KEYS)
            for key in parser[section]:
                _refuse_unknown(path, f"key in [{section}]", key, KEYS[known])
            if is_of_widths:
                own[section] = {key: _text(path, parser, section, key) for key in parser[section]}
        found = {section: {key: _text(path, parser, section, key) for key in keys} for section, keys in KEYS.items()}
        file = cls(path, found, own)
        for each in (file, *(file.at(width) for width in (file.widths if own else ()))):
            each.check()
        return file

    def at(self, width: int) -> ClusterFile:
        chosen = next((section for section in self.own if _covers(section, width)), "")
        values = {**self.values, "sbatch": {**self.values["sbatch"], **self.own.get(chosen, {})}}
        return replace(self, values=values, chosen=chosen)

    def text(self, section: str, key: str) -> str:
        return self.values[section][key]

    def value(self, section: str, key: str) -> Any:
        """What the text says, as ``KEYS`` has it."""
        text, known = self.text(section, key), KEYS[section][key]
        if known.optional and not text:
            return None
        try:
            found = known.parse(text)
        except ValueError as error:
            raise self.wrong(section, key, f"{known.expected} ({error})") from None
        if found is None:
            raise self.wrong(section, key, known.expected)
        return found

    def words(self, section: str, key: str) -> list[str]:
        return list(self.value(section, key))

    @property
    def checkout(self) -> Path:
        found = Path(self.value("suite", "checkout")).absolute()
        if not found.is_dir():
            raise self.wrong("suite", "checkout", "a folder that is there, with the suite")
        return found

    @property
    def results(self) -> Path:
        """Where each submission has a folder of its own."""
        return self.checkout / Path(self.value("suite", "results"))

    @property
    def widths(self) -> list[int]:
        return list(self.value("suite", "gpus"))

    @property
    def without(self) -> LeftOut:
        """The widths of tests that this night is not for; none of them is in ``gpus``."""
        found: LeftOut = self.value("suite", "without")
        if both := sorted({*self.widths} & found.widths):
            raise self.wrong("suite", "without", f"none of gpus, and {both[0]} is in both")
        return found

    @property
    def is_array(self) -> bool:
        """Whether widths have jobs, or tasks of one, of their own."""
        return self.text("suite", "mode") == "array"

    @property
    def on_cpu(self) -> bool:
        return bool(self.value("cluster", "on_cpu"))

    def check(self) -> None:
        for section, keys in KEYS.items():
            for key in keys:
                self.value(section, key)
        _ = self.without
        if "\\" in str(self.results):  # with one in it, SLURM fills in nothing of a log's name
            raise self.wrong("suite", "results", f"a folder whose path, {self.results}, has no backslash")
        self._check_options()
        self._check_widths()
        for section, values in self.values.items():
            for key, text in values.items():
                if "CHANGE-ME" in text:
                    raise self.wrong(section, key, "your site's own value; copy the example and change it")

    def _check_options(self) -> None:
        if option := reserved_in(self.words("suite", "options")):
            raise self.wrong("suite", "options", f"no {option}, {RESERVED[option]}")
        one_each = [key for key in (*_SBATCH_KEYS, "exclusive") if self.text("sbatch", key) not in ("", "no")]
        said = {f"--{key}": f"of which [sbatch] {key} has one" for key in one_each}
        for key, reserved in (("options", {**SBATCH, **said}), ("merge_options", SBATCH_MERGE)):
            given = self.words("sbatch", key)
            if given and not given[0].startswith("-"):
                raise self.wrong("sbatch", key, f"options of sbatch, and {given[0]} is none")
            if option := reserved_by_sbatch(given, reserved):
                raise self.wrong("sbatch", key, f"no {option}, {reserved[option]}")

    def _check_widths(self) -> None:
        """Each node has as many ranks; a section of widths is for one of the night's, and no width in two."""
        per_node = self.value("cluster", "gpus_per_node")
        for width in (width for width in self.widths if not _fits(width, per_node)):
            below = next(each for each in range(width, 0, -1) if _fits(each, per_node))
            above = next(each for each in range(width, 2 * width + 1) if _fits(each, per_node))
            expected = f"the same number on each node, of which each has {per_node} (gpus_per_node); not {width}"
            raise self.wrong("suite", "gpus", f"{expected}, but {below} or {above}")
        for section, values in self.own.items():
            covered = [width for width in self.widths if _covers(section, width)]
            both = [other for other in sorted({*self.own} - {section}) if covered and _covers(other, covered[0])]
            expected = ""
            if not self.is_array:
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

    def wrong(self, section: str, key: str, expected: str) -> ClusterError:
        """Why a value cannot serve, to be raised."""
        where = self.chosen if section == "sbatch" and key in self.own.get(self.chosen, {}) else section
        return ClusterError(f"{self.path}: [{where}] {key} = {self.text(section, key)}: expected {expected}")


def _covers(section: str, width: int) -> bool:
    """Whether a section like ``sbatch 1-2, 8+`` is for ``width``."""
    match = _OF_WIDTHS.fullmatch(section)
    ranges = [_RANGE.fullmatch(word) for word in (_listed(match["widths"]) if match else ())]
    return all(ranges) and any(
        int(found["first"]) <= width and (found["wider"] or width <= int(found["last"] or found["first"]))
        for found in filter(None, ranges)
    )


def _fits(width: int, per_node: int) -> bool:
    return width % -(-width // per_node) == 0  # by the fewest nodes with so many


def _text(path: Path, parser: configparser.ConfigParser, section: str, key: str) -> str:
    known = KEYS[section if section in KEYS else "sbatch"][key]
    if (value := parser.get(section, key, fallback=known.default)) is None:
        raise ClusterError(f"{path}: [{section}] {key} is missing; for a whole file see llmperf submit --example")
    lines = value.strip().splitlines()
    text = " ".join(lines).replace("\t", " ")
    if (len(lines) > 1 and not known.is_long) or not text.isprintable():
        raise ClusterError(f"{path}: [{section}] {key} = {text!r}: expected one line of printable text")
    return text


def _refuse_unknown(path: Path, what: str, name: str, known: Mapping[str, object]) -> None:
    if name not in known:
        raise ClusterError(f"{path}: unknown {what}: {name!r}{instead(name, known)}; known: {', '.join(known)}")


# Of pytest, of sbatch for each job, and for the one that merges: what a night gives itself, with what says it instead.
_RESERVED = shipped(__file__, "reserved.ini")
RESERVED, SBATCH, SBATCH_MERGE = (
    {option: why for options, why in _RESERVED[name].items() for option in options.split()}
    for name in ("pytest", "sbatch", "merge")
)
# Of pytest and pytest-xdist: after these the rest of a word is the value.
_SHORT_WITH_VALUE = "cmnoprW"

# Of sbatch, by the option that it is short for.
_SBATCH_SHORT = _RESERVED["letters"]
# The short options of sbatch after which the rest of a word is the value.
_SBATCH_WITH_VALUE = "aAbBcCdDeFGiJLmMnNopPqStUwxZ"


def reserved_by_sbatch(words: Sequence[str], reserved: Mapping[str, str]) -> str:
    """The first of ``words`` that is ``reserved``, in full, short or shortened; empty: none is."""
    letters = {letter: option for letter, option in _SBATCH_SHORT.items() if option in reserved}
    for word in words:
        name = word.partition("=")[0]
        if not name.startswith("--"):
            found = _short(word, letters, _SBATCH_WITH_VALUE)
        else:  # sbatch takes the beginning of a name for the whole
            found = next((option for option in reserved if name != "--" and option.startswith(name)), "")
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


def _short(word: str, letters: Mapping[str, str], with_value: str) -> str:
    """The option of ``letters`` in ``-k``, ``-kx``, ``-k=x`` or ``-vk``; empty where there is none."""
    for letter in word[1:] if word.startswith("-") else "":
        if letter in letters:
            return letters[letter]
        if letter in with_value:
            return ""
    return ""
