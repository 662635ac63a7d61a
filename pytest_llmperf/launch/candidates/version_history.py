"""Histories of versions: of a package that pip installs beside what is installed here, or by a command for each."""

from __future__ import annotations

import re
import shlex
import site
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from packaging.version import InvalidVersion, Version

from pytest_llmperf.launch.candidates.errors import HistoryError, NotMadeError
from pytest_llmperf.launch.candidates.history import Span
from pytest_llmperf.launch.candidates.place import made, probed, run, script
from pytest_llmperf.records.candidate import Candidate
from pytest_llmperf.support.suggestions import hint

#: What a command has in place of a version.
PLACE = "{version}"

_AVAILABLE = re.compile(r"^Available versions:\s*(.+)$", re.MULTILINE)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class PackageHistory:
    """Each version in an environment of its own, which has everything else from this one."""

    package: str
    versions: Sequence[str] = ()
    """Those to compare; if none are given, those that pip's index has between the ends."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.package):
            raise HistoryError(f"--package {self.package}: expected a distribution's name, e.g. transformers")

    @property
    def key(self) -> tuple[str, ...]:
        """Of which package, beside what."""
        return ("package", self.package, sys.prefix)

    def span(self, good: str, bad: str) -> Span:
        """See ``History``."""
        for option, version in (("--good", good), ("--bad", bad)):
            _version(option, version)
        if _version("--good", good) == _version("--bad", bad):
            raise HistoryError(f"--good {good} and --bad {bad} are the same version")
        if _version("--good", good) > _version("--bad", bad):
            raise HistoryError(f"--good {good} comes after --bad {bad}: exchange them")
        known = list(self.versions) or self._of_the_index()
        if not self.versions:
            for option, version in (("--good", good), ("--bad", bad)):
                if version not in known:
                    raise HistoryError(
                        f"{option} {version}: the index has no such {self.package}{hint(version, known)}"
                    )
        low, high = _version("--good", good), _version("--bad", bad)
        given = {one: text for text, one in ((text, _version("--versions", text)) for text in known)}
        within = sorted(one for one in given if low < one < high)
        beyond = [given[one] for one in sorted(given) if not low <= one <= high]
        note = f"of --versions, {', '.join(beyond)}: not between {good} and {bad}, left out"
        return replace(_line([good, *map(str, within), bad]), notes=(note,) if beyond and self.versions else ())

    def python(self, candidate: Candidate) -> str:
        """See ``History``."""

        def make(folder: Path) -> None:
            home = folder / "venv"
            run([sys.executable, "-m", "venv", str(home)])
            python = str(home / "bin" / "python")
            packages = run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]).strip()
            # What this version does not replace, and need not, is found where it is installed now.
            users = [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
            ours = dict.fromkeys([*site.getsitepackages(), *users])
            lines = "".join(f"import site; site.addsitedir({path!r})\n" for path in ours)
            Path(packages, "_beside.pth").write_text(lines, encoding="utf-8")
            wanted = f"{self.package}=={candidate.name}"
            run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wanted])

        return probed(str(made("package", (*self.key, candidate.name), make) / "venv" / "bin" / "python"))

    def further(self, candidate: Candidate) -> str:
        """See ``History``."""
        return f"its release notes, or: pip download --no-deps {self.package}=={candidate.name}"

    def _of_the_index(self) -> list[str]:
        try:
            said = run([sys.executable, "-m", "pip", "index", "versions", self.package, "--disable-pip-version-check"])
        except NotMadeError as error:
            raise HistoryError(
                f"--package {self.package}: pip lists no versions, name them by --versions ({error})"
            ) from error
        found = _AVAILABLE.search(said)
        return [text.strip() for text in found[1].split(",")] if found else []


@dataclass(frozen=True)
class CommandHistory:
    """Each version by a command that is its interpreter: one of another environment, or of a container."""

    command: str
    versions: Sequence[str]

    def __post_init__(self) -> None:
        if PLACE not in self.command:
            raise HistoryError(f"--python {self.command}: expected {PLACE} in it, e.g. /envs/torch-{PLACE}/bin/python")
        try:
            shlex.split(self.command)
        except ValueError as error:
            raise HistoryError(f"--python {self.command}: no command ({error})") from error
        if not self.versions:
            raise HistoryError("--python needs --versions: which there are, the oldest first, e.g. 2.8.0,2.9.1,2.10.0")

    @property
    def key(self) -> tuple[str, ...]:
        """By which command, and where."""
        # Words may name files of this folder; another one has others by the same names.
        return ("command", self.command, str(Path.cwd()))

    def span(self, good: str, bad: str) -> Span:
        """See ``History``."""
        for option, version in (("--good", good), ("--bad", bad)):
            if version not in self.versions:
                known = ",".join(self.versions)
                raise HistoryError(f"{option} {version}: none of --versions {known}{hint(version, self.versions)}")
        first, last = self.versions.index(good), self.versions.index(bad)
        if first == last:
            raise HistoryError(f"--good {good} and --bad {bad} are the same version")
        if first > last:
            raise HistoryError(f"--good {good} comes after --bad {bad} in --versions, which has the oldest first")
        return _line(self.versions[first : last + 1])

    def python(self, candidate: Candidate) -> str:
        """See ``History``."""
        words = [word.replace(PLACE, candidate.name) for word in shlex.split(self.command)]

        def make(folder: Path) -> None:
            script(folder / "python", [f'exec {shlex.join(words)} "$@"'])

        return probed(str(made("command", (*self.key, candidate.name), make) / "python"))

    def further(self, candidate: Candidate) -> str:
        """See ``History``."""
        return f"{self.command.replace(PLACE, candidate.name)} -m pip list"


def _line(names: Sequence[str]) -> Span:
    candidates = tuple(Candidate(name, (before,)) for before, name in pairwise(names))
    return Span(Candidate(names[0]), candidates)


def _version(option: str, text: str) -> Version:
    try:
        return Version(text)
    except InvalidVersion:
        raise HistoryError(f"{option} {text}: no version, expected e.g. 4.55.0") from None
