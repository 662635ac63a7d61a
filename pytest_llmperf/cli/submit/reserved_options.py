"""Reserved: options that submit gives pytest or sbatch itself. Said twice, one alone would count, without a word."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

_JOB = "which the nightly job gives pytest itself"

#: Each with what says it instead.
RESERVED: Mapping[str, str] = {
    "-k": "of which pytest knows the last alone; say it as [suite] select",
    "--gpus": "which the nightly job gives pytest for each width; say them as [suite] gpus",
    **dict.fromkeys(("--perf-json", "--perf-resume", "--perf-width", "--perf-plan"), _JOB),
    "--perf-dry-run": "of which no night has results; see llmperf submit --dry-run",
}

_SUBMIT = "which submit gives sbatch itself"
_STARTS = "say how often it starts as [suite] max_restarts"
_NOT_SUBMITTED = "with which sbatch submits no job of this night"

#: Of sbatch, for each job.
SBATCH: Mapping[str, str] = {
    "--time": "say it as [sbatch] time",
    "--array": "say it as [suite] mode",
    "--job-name": "say it as [cluster] name",
    **dict.fromkeys(("--nodes", "--ntasks", "--ntasks-per-node"), "which follow from [suite] gpus and gpus_per_node"),
    **dict.fromkeys(("--output", "--error", "--open-mode"), "since logs lie in the folder of [suite] results"),
    **dict.fromkeys(("--requeue", "--no-requeue"), _STARTS),
    **dict.fromkeys(("--signal", "--parsable", "--dependency", "--input"), _SUBMIT),
    **dict.fromkeys(
        ("--gpus", "--gpus-per-node", "--ntasks-per-gpu"), "which follow from [suite] gpus; see [sbatch] gres"
    ),
    "--hold": "with which no night begins",
    "--wait": "say it as llmperf submit --wait",
    **dict.fromkeys(("--wrap", "--test-only", "--help", "--usage", "--version"), _NOT_SUBMITTED),
}
#: Of sbatch, where a key of the file says the same.
SBATCH_KEYS = ("account", "partition", "qos", "constraint", "gres", "exclusive")
#: Of sbatch, for the job that merges: what else submit gives it may be said otherwise.
SBATCH_MERGE: Mapping[str, str] = {
    **{option: SBATCH[option] for option in ("--wrap", "--test-only", "--help", "--usage", "--version", "--parsable")},
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

# Of pytest and pytest-xdist: after these the rest of a word is the value.
_SHORT_WITH_VALUE = "cmnoprW"


def reserved_by_sbatch(words: Sequence[str], reserved: Mapping[str, str]) -> str | None:
    """The first of ``words`` that is ``reserved``, in full, short or shortened; ``None``: none is."""
    for word in words:
        name = word.partition("=")[0]
        if name.startswith("--"):
            # sbatch takes the beginning of a name for the whole.
            found = next((option for option in reserved if len(name) > len("--") and option.startswith(name)), None)
        else:
            found = _sbatch_short(word, reserved)
        if found is not None:
            return found
    return None


def _sbatch_short(word: str, reserved: Mapping[str, str]) -> str | None:
    for letter in word[1:] if word.startswith("-") else "":
        if _SBATCH_SHORT.get(letter) in reserved:
            return _SBATCH_SHORT[letter]
        if letter in _SBATCH_WITH_VALUE:
            return None
    return None


def reserved_in(words: Sequence[str]) -> str | None:
    """The first of ``words`` that is reserved, however pytest lets it be written; ``None``: none is."""
    for word in words:
        if word == "--":  # what follows are paths
            return None
        name, _, value = word.removeprefix("-o").removeprefix("--override-ini=").lstrip("=").partition("=")
        if name == "addopts" and (inner := reserved_in(_words(value))):
            return inner
        option = word.partition("=")[0] if word.startswith("--") else _short(word)
        if option in RESERVED:
            return option
    return None


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


def _short(word: str) -> str:
    """``-k`` for ``-k``, ``-kx``, ``-k=x`` and ``-vk``; empty where it is not among the options of ``word``."""
    if not word.startswith("-"):
        return ""
    for letter in word[1:]:
        if f"-{letter}" in RESERVED:
            return f"-{letter}"
        if letter in _SHORT_WITH_VALUE:
            return ""
    return ""
