"""Options that submit gives pytest or sbatch itself: said twice, only one would count, without a word."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

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
#: Of sbatch, for each job.
SBATCH: Mapping[str, str] = {
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
#: For the job that merges: what else submit gives it may be said otherwise.
SBATCH_MERGE: Mapping[str, str] = {
    **{option: SBATCH[option] for option in (*_SUBMITS_NONE, "--parsable")},
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
