"""What a failing test prints: the verdict, its figures, what may explain it and what to do next. Its own words are
ASCII: pytest shows a failure on whatever terminal or log there is."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

from pytest_llmperf.records.metrics import METRICS, formatted, label
from pytest_llmperf.records.result import VERDICTS, CaseResult, Check, is_choice
from pytest_llmperf.report.text import Column, detectable_words, draw, one_line
from pytest_llmperf.support import formats

MAX_LINES = 30

# What keeps a message below MAX_LINES: at most these, and one line for what was left out of each.
_MOST_METRICS, _MOST_DETAILS, _MOST_DIFFERENCES, _MOST_REASONS = 6, 3, 4, 7
_MOST_NOTES, _MOST_CHANGES, _MOST_CHOICES = 2, 3, 2
# What is read at a glance: so many letters, and so many causes however long they are.
_LONGEST_HEADLINE, _FEWEST_CAUSES = 400, 3
_HEAD = ("metric", "measured", "baseline", "limit", "change", "detectable", "")
_INDENT = "  "


def failure_message(result: CaseResult, rerun: str, accept: str, baseline: str = "none") -> str:
    """The message of a failing case, at most ``MAX_LINES`` lines. ``rerun`` and ``accept`` are commands, ``baseline``
    says how much it was held against. An invalid case is offered no ``accept``: its launches are never stored."""
    between = "between the environments" if result.launches_before else "from the baseline's environment"
    context = [
        one_line(f"measured: {_measured(result)}; baseline: {baseline}"),
        *([f"{changed_title(result)}:", *_first_n(result.changed, _MOST_CHANGES)] if result.changed else []),
        *(one_line(f"note: {note}") for note in result.notes[:_MOST_NOTES]),
        *different(result.differences, f"different {between}"),
    ]
    again, record = _command("run it again", rerun), _command("accept it", accept)
    if result.verdict == "new":
        lines = [*_header(result, result.reason), *_figures(result), *_command("record it", accept)]
    elif result.verdict == "invalid":
        step = [one_line(f"a step beside the baseline's: {result.diagnosis}")] if result.diagnosis else []
        # The first reason is all that pytest's short summary shows.
        first, *others = [reason for reason in re.split(r"\n|; ", result.reason) if reason.strip()] or [""]
        also = _first_n([f"also: {reason.strip()}" for reason in others], _MOST_REASONS)
        lines = [*_header(result, first), *also, *step, *context, *again]
    else:
        told = [check for check in _gating(result) if check.detail and check.detail not in result.reason]
        details = [f"{label(check.metric)}: {check.detail}" for check in told]
        shown = [*_table(result), *_first_n(details, _MOST_DETAILS)]
        lines = [*_header(result, result.reason), *shown, *context, *again, *record]
    return "\n".join(lines)


def _header(result: CaseResult, reason: str) -> list[str]:
    """The headline, and a line for what it has no room for."""
    is_led = bool(_choices(result))
    if result.changed and result.verdict in ("pass", "improved", "changed") and not is_led:  # why a strict run fails
        reason = f"{changed_title(result)}: {result.changed[0]}; {reason}"
    strictly = ", which --perf-strict fails" if result.verdict in ("pass", "improved", "changed") else ""
    told, left = headline(result, reason)
    also = [one_line(f"also: {'; '.join(left)}")] if left else []
    return [one_line(f"{result.id}: {result.verdict}{strictly}: {told}"), *also]


def headline(
    result: CaseResult, reason: str, *, longest: float = _LONGEST_HEADLINE, where: str = ""
) -> tuple[str, list[str]]:
    """As much of what explains ``result`` as fits, its figures always; and what is left out, to be read ``where``."""
    causes, left = [cause for told in _explained(result, reason) for cause in told.split("; ") if cause], list[str]()
    while len("; ".join(causes)) > longest and len(causes) > _FEWEST_CAUSES:
        is_figure = any(causes[-1].startswith(f"{check.metric} ") for check in result.checks)
        left.insert(0, causes.pop(-2 if is_figure else -1))
    return "; ".join([*causes, *([f"and {len(left)} more{where}"] if left else [])]), left


def _choices(result: CaseResult) -> list[str]:
    """What the user of a script chose otherwise: whatever else changed may come of it."""
    is_script = any(launch.is_script for launch in result.launches)
    return [line for line in result.changed if is_script and is_choice(line)][:_MOST_CHOICES]


def _explained(result: CaseResult, reason: str) -> list[str]:
    """``reason`` and what traces point to: before a loss of speed, its cause; after anything else, as what it took. A
    script's figures come first; on a CPU, whose times are noise, what is exact does."""
    if result.verdict == "invalid":  # whose evidence has said more
        return [reason]
    told = _PLACE.sub(lambda place: "" if place[1] in reason else place[0], result.diagnosis)
    lost = [check for check in result.checks if check.verdict == result.verdict]
    is_exact = bool(lost) and all(check.tolerance == 0 for check in lost)
    is_on_host = any(launch.trace and launch.trace.is_on_host for launch in result.launches)
    is_speed = not lost or any(map(_is_speed, lost))
    if is_on_host and is_speed and not is_exact and result.verdict in ("regressed", "inconclusive"):
        causes = _exact_first(result, reason, told)
    else:
        is_script = any(launch.is_script for launch in result.launches)
        causes = [reason, told] if is_exact or is_on_host or is_script or not is_speed else [told, reason]
    chosen = ", ".join(_choices(result))
    return [f"{changed_title(result)}: {chosen}", *causes] if chosen else causes


def _is_speed(check: Check) -> bool:
    return check.metric in METRICS and METRICS[check.metric].rule == "speed"


# A line of the user's code as a diagnosis has it among others.
_PLACE = re.compile(r", ([\d.]+ a step at (?:(?!, [\d.]+ a step at |; ).)+)")


def _exact_first(result: CaseResult, reason: str, told: str) -> list[str]:
    """Counts and losses that are not as they were, then the figure that was lost, then where: lines, files, kernels."""
    figures, *words = reason.split("; ")
    starts = sorted(at for check in result.checks if (at := figures.find(f"{check.metric} ")) > 0)
    own = [figures[at:to].removesuffix(", ") for at, to in pairwise([0, *starts, len(figures)])]
    # What regressed and is no speed, such as a leak, is no noise of a CPU's either.
    firm = {check.metric for check in result.checks if check.verdict == "regressed" and not _is_speed(check)}
    moved = [one for one in result.checks if one.metric in firm or (one.tolerance == 0 and one.verdict == "changed")]
    exact = [line for line in own if any(line.startswith(f"{check.metric} ") for check in moved)]
    exact += [
        f"{label(check.metric)} {formatted(check.metric, check.baseline, check.unit)} -> "
        f"{formatted(check.metric, check.value, check.unit)}"
        for check in moved
        if not any(line.startswith(f"{check.metric} ") for line in own)
    ]
    if result.changed and not _choices(result):
        exact.append(f"{changed_title(result)}: {result.changed[0]}")
    return [*exact, ", ".join(line for line in own if line not in exact), *words, told]


def _command(words: str, command: str) -> list[str]:
    return [one_line(f"{words}: {command}")] if command else []


def _first_n(lines: Sequence[str], most: int) -> list[str]:
    """The first of ``lines``, indented, and how many more there are."""
    shown = [(_INDENT + one_line(line)).rstrip() for line in lines[:most]]
    return shown + ([f"{_INDENT}... and {len(lines) - most} more"] if len(lines) > most else [])


def _gating(result: CaseResult) -> list[Check]:
    """Worst first, and in their own order among equals."""
    checks = [check for check in result.checks if check.gates or check.verdict is not None]
    return sorted(checks, key=lambda one: VERDICTS.index(one.verdict) if one.verdict in VERDICTS else len(VERDICTS))


def _table(result: CaseResult) -> list[str]:
    if not (checks := _gating(result)):
        return []
    rows = map(_row, checks[:_MOST_METRICS])
    columns = [Column(head, cells) for head, cells in zip(_HEAD, zip(*rows, strict=True), strict=True)]
    used = [column for column in columns if {*column.cells} - {"", formats.ABSENT}]
    lines = [_INDENT + line for line in draw([replace(used[0], right=False), *used[1:]])]
    return lines + _first_n([f"metric {check.metric}" for check in checks], _MOST_METRICS)[_MOST_METRICS:]


def _row(check: Check) -> tuple[str, ...]:
    figures = (formatted(check.metric, each, check.unit) for each in (check.value, check.baseline, check.limit))
    words = formats.percent(check.change), detectable_words(check), one_line(check.verdict or "")
    return one_line(label(check.metric)), *figures, *words


def _figures(result: CaseResult) -> list[str]:
    """A new case has nothing to stand beside: its figures in one line."""
    figures = [f"{label(check.metric)} {formatted(check.metric, check.value, check.unit)}" for check in _gating(result)]
    measured = _measured(result)
    return [_INDENT + one_line(f"{', '.join(figures[:_MOST_METRICS])} ({measured})" if figures else measured)]


def _measured(result: CaseResult) -> str:
    launches, soak = result.launches, result.soak
    if soak:
        return f"{soak.steps:,} steps in {formats.elapsed(soak.seconds)}"
    if not launches:
        return "no launch"
    steps = _range(len(launch.step_seconds) for launch in launches)
    warmup = _range(launch.steady.start for launch in launches)
    nodes = sorted({launch.seen.run.slurm_nodes or "" for launch in launches} - {""})
    where = f" on {', '.join(nodes)}" if nodes else ""
    number = "1 launch" if len(launches) == 1 else f"{len(launches)} launches"
    return f"{number} of {steps} steps ({warmup} of them warm-up){where}"


def _range(numbers: Iterable[int]) -> str:
    low, *others = sorted({*numbers})
    return f"{low} to {others[-1]}" if others else f"{low}"


def changed_title(result: CaseResult) -> str:
    """The title of the lines; where two sides took turns there is no baseline."""
    return "not the same on both sides" if result.launches_before else "changed since the baseline"


def different(lines: Sequence[str], title: str = "different from the baseline's environment") -> list[str]:
    """``lines``, each ``name: then -> now``, below their title; none where there are none."""
    return [f"{title}:", *_first_n(lines, _MOST_DIFFERENCES)] if lines else []
