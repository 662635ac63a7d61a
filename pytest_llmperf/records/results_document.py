"""The results document: what ``--perf-json`` writes and ``merge``, ``export``, ``history``, ``report`` and pages read.

A reader is strict, where it decides whether a night is green, or lenient, where it shows what it can."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.result import STAND_INS, VERDICTS, Reference, Soak
from pytest_llmperf.support import codec
from pytest_llmperf.support.codec import Number

SCHEMA = 1
#: The node id of a test in ``rerun``.
TEST = "{test}"
#: How much a test said of what it runs: every spec; those up to one that cannot run here; some, and then it ended.
Said = Literal["some", "stopped", "all"]

Elsewhere = Literal["", "test", "case"]

LaunchRecord = Annotated[Mapping[str, Any], Meta(extra_json_schema={"$ref": "#/$defs/Launch"})]
_Verdict = Annotated[str, Meta(extra_json_schema={"enum": list(VERDICTS)})]

_COMMON = {"$ref": "#/$defs/CommonChange"}
_AllCases = Annotated[
    Mapping[str, Any], Meta(extra_json_schema={"anyOf": [_COMMON, {"additionalProperties": _COMMON}]})
]

# A record has about ten levels; where Python cannot write any deeper depends on who calls.
_DEEPEST = 100

_EXPECTED = "expected a file of --perf-json"


class ResultsError(ValueError):
    """A file of results that cannot serve: one line with the file, what is wrong and what to do."""


class NoResultsError(ResultsError):
    """It is something else."""


@codec.sparse("value", "unit", "baseline", "limit", "change", "detectable")
@dataclass(frozen=True, kw_only=True)
class Figure:
    """A metric of a case."""

    value: Number | None = None
    unit: str = ""
    baseline: Number | None = None
    limit: Number | None = None
    """The value beyond which it counts as regressed."""
    change: Number | None = None
    detectable: Number | None = None
    """The smallest change that this gate would have seen."""
    by_itself: Number | None = None
    """The loss that this case, unlike all others, has on other hosts when nothing changed, at most."""
    interval: tuple[Number, Number] | None = None
    """Between which the change is, nine times in ten."""
    verdict: str = ""
    """Its own, where it is not the case's."""
    detail: str = ""
    times_slower: Number | None = None
    """How many times slower still passes, where that is a multiple, as on a CPU."""


@codec.sparse("reason", "launches")
@dataclass(frozen=True, kw_only=True)
class Result:
    """A case."""

    id: str
    digest: str
    nodeid: str
    verdict: _Verdict
    reason: str = ""
    metrics: Mapping[str, Figure]
    launches: tuple[LaunchRecord, ...] = ()
    launches_before: tuple[LaunchRecord, ...] = ()
    """Of the other side, where two took turns."""
    rung: str = ""
    reference: Reference | None = None
    changed: tuple[str, ...] = ()
    differences: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    diagnosis: str = ""
    soak: Soak | None = None
    updated: str = ""
    """What was recorded, a line each."""
    shares: str = ""
    shared_launches: int = 0
    """How many of them, the first ones, that or another test has too."""

    def figure(self, metric: str) -> Figure:
        """It, or what stands in its place; one without a value where the case has none."""
        return next((one for name, one in self.metrics.items() if metric in (name, STAND_INS.get(name))), Figure())


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One of a machine."""

    name: str = ""
    memory_bytes: int = 0
    uuid: str = ""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Where a run was."""

    kind: str = ""
    cores: int | None = None
    gpus: tuple[Gpu, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SpentTime:
    """By all launches together, also those of no result."""

    launches: int = 0
    seconds: Number = 0.0
    phases: Mapping[str, Number] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Of the GPUs that launches held."""

    gpu_hours: Number = 0.0
    gpu_hour: Number | None = None
    currency: str = ""
    total: Number | None = None


@dataclass(frozen=True, kw_only=True)
class EndedTest:
    """How a phase of a test ended."""

    nodeid: str
    outcome: str
    phase: str = ""
    reason: str = ""

    @property
    def has_failed(self) -> bool:
        return self.outcome in ("failed", "error")


@dataclass(frozen=True, kw_only=True)
class TreeRevision:
    """The tree that ran."""

    commit: str
    changed: int
    """How many files differed from it."""

    def __str__(self) -> str:
        return self.commit + (f" + {self.changed} changed" if self.changed else "")


@dataclass(frozen=True, kw_only=True)
class SlurmJob:
    """Inside of which the run was."""

    job: str
    starts: int


@dataclass(frozen=True, kw_only=True)
class CommonChange:
    """What all cases have in common."""

    verdict: _Verdict
    told: str = ""
    slower_by: Number | None = None
    low: Number | None = None
    high: Number | None = None
    cases: int | None = None
    gpus: int | None = None
    is_known: bool | None = None
    is_calibrated: bool | None = None
    together: Number | None = None


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """One case that cannot run here."""

    id: str
    nodeid: str = ""
    width: int = 0
    """GPUs, or ranks on the CPU, of its widest spec."""
    reason: str
    lost: bool = False
    """Whether it ran before: it has a baseline, and the environment lacks a package."""
    elsewhere: Elsewhere = ""
    """What of it is of another width than the run: the whole test, this case of it, or nothing."""


@dataclass(frozen=True, kw_only=True)
class Planned:
    """One case that a dry run would have launched."""

    id: str
    nodeid: str
    width: int
    launches: int = 0
    gpus: int = 0
    seconds: Number | None = None
    """Expected wall seconds of all its launches, from its baseline; ``None`` where there is none."""
    skipped: str = ""
    judges: bool = True
    """Whether a result comes of it; launches alone are what ``perf.measure`` returns."""


@dataclass(frozen=True, kw_only=True)
class SeenSuite:
    """What a run saw of its suite."""

    nodes: tuple[str, ...]
    parts: tuple[str, ...]
    gaps: tuple[str, ...]
    said: Mapping[str, Said]


@dataclass(frozen=True, kw_only=True)
class Suite:
    """What several widths together need to tell what each alone cannot."""

    rootdir: str
    baselines: str
    digests: tuple[str, ...]
    coverage: SeenSuite
    strict: bool
    perf_width: int | None = None
    baselines_digest: str = ""
    stopped: bool = False


@codec.sparse("machine", "results")
@dataclass(frozen=True, kw_only=True)
class ResultsDocument:
    """A run, or a night of several."""

    schema: int = SCHEMA
    machine: Machine = Machine()
    results: tuple[Result, ...]
    spent: SpentTime | None = None
    exit_code: int | None = None
    ended_at: str = ""
    cost: Cost | None = None
    tests: tuple[EndedTest, ...] = ()
    command: str = ""
    """The one that made it, as a person types it."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Of the packages of a run that launched nothing."""
    rerun: tuple[str, ...] = ()
    """The words that run a test again, with ``{test}`` where its node id stands."""
    revision: TreeRevision | None = None
    project: str = ""
    slurm: SlurmJob | None = None
    all_cases: _AllCases = field(default_factory=dict)
    """A common change; of a night one for each of its files."""
    unjudged: str = ""
    """Why all cases together were not judged."""
    skipped: tuple[Skipped, ...] = ()
    planned: tuple[Planned, ...] = ()
    suite: Suite | None = None
    unfinished: str = ""
    machines: Mapping[str, Machine] = field(default_factory=dict)
    troubles: tuple[str, ...] = ()
    """Of a night: why it is not green."""

    @property
    def kind(self) -> str:
        """The kind of its machine; of a night that of all its machines, where they have one; else empty."""
        kinds = {machine.kind for machine in (self.machine, *self.machines.values())} - {""}
        return kinds.pop() if len(kinds) == 1 else ""

    @property
    def changes_told(self) -> Mapping[str, Any]:
        return {"all cases": self.all_cases} if "verdict" in self.all_cases else self.all_cases

    @cached_property
    def common(self) -> Mapping[str, CommonChange]:
        """The change that all cases have in common: of a run, or by its file of each of a night's."""
        read = {name: codec.read_lenient(CommonChange, each) for name, each in self.changes_told.items()}
        return {name: found for name, found in read.items() if found is not None}


def document_of(values: object) -> ResultsDocument:
    """The document in ``values`` as far as it can be read: what does not fit is absent."""
    return codec.read_lenient(ResultsDocument, values) or ResultsDocument(results=())


def read_values(path: Path, *, exact: bool = False) -> dict[str, Any]:
    """What ``path`` holds, what is no finite number as null, or refused if ``exact``; else a ``ResultsError``."""
    real, whole = partial(_number, float, exact=exact), partial(_number, int, exact=exact)
    try:
        values = json.loads(path.read_text(encoding="utf-8"), parse_float=real, parse_int=whole, parse_constant=real)
    except OSError as error:
        raise ResultsError(f"{path}: cannot be read ({error.strerror or error}); {_EXPECTED}") from error
    except UnicodeDecodeError:
        raise ResultsError(f"{path}: not UTF-8; {_EXPECTED}") from None
    except RecursionError:
        raise ResultsError(f"{path}: nested too deeply; {_EXPECTED}") from None
    except ValueError as error:
        raise ResultsError(f"{path}: not JSON, perhaps truncated ({error}); {_EXPECTED}") from None
    if not isinstance(values, dict) or "results" not in values:
        raise NoResultsError(f"{path}: no results in it; {_EXPECTED}")
    schema = values.get("schema")
    if isinstance(schema, int) and schema > SCHEMA:
        raise ResultsError(
            f"{path}: schema {schema} is newer than this version understands ({SCHEMA}); upgrade pytest-llmperf"
        )
    if not isinstance(values["results"], list) or _is_deep(values):
        raise ResultsError(f"{path}: its results are no list, or nested too deeply; {_EXPECTED}")
    return values


@dataclass(frozen=True)
class ResultsFile:
    """A file of results, all of which is what it should be."""

    path: Path
    document: ResultsDocument
    values: Mapping[str, Any]
    """As the file has them, for whoever passes them on."""

    @classmethod
    def read(cls, path: Path, *, exact: bool = False) -> ResultsFile:
        """The strict reading, for whoever decides by it: unknown fields pass, a ``ResultsError`` tells the rest."""
        values = read_values(path, exact=exact)
        try:
            if values.get("schema") is not SCHEMA:
                raise ValueError(f"schema is {values.get('schema')!r}, expected {SCHEMA}")
            for name in (name for name, value in values.items() if value is None):
                raise ValueError(f"{name} is null, expected it or nothing")
            document = codec.read(ResultsDocument, values, "the document", newer=True)
            for name, each in document.changes_told.items():
                codec.read(CommonChange, each, name, newer=True)
            common = ((name, each.verdict) for name, each in document.common.items())
            for name, verdict in (*((each.id, each.verdict) for each in document.results), *common):
                if verdict not in VERDICTS:
                    raise ValueError(f"{name}: verdict {verdict!r}, expected one of {', '.join(VERDICTS)}")
        except ValueError as error:
            raise ResultsError(f"{path}: {error}; {_EXPECTED}") from error
        return cls(path, document, values)


def launch_of(record: Mapping[str, Any]) -> Launch:
    """The launch in a document, whose losses and norms may be no numbers (null there); ``ValueError``: it is none."""
    if not isinstance(record, Mapping):
        raise ValueError("a launch is no object")
    figures = {name: _numbers(record[name]) for name in ("losses", "gradient_norms") if name in record}
    if isinstance(record.get("learning"), Mapping):
        figures["learning"] = _numbers(record["learning"])
    return codec.read(Launch, {**record, **figures})


def _numbers(value: Any) -> Any:
    if isinstance(value, list):
        return list(map(_numbers, value))
    if isinstance(value, Mapping):
        return {name: _numbers(item) for name, item in value.items()}
    return math.nan if value is None else value


def _number(kind: Callable[[str], float], text: str, *, exact: bool) -> float | None:
    if math.isfinite(float(text)):
        return kind(text)
    if exact:
        raise ValueError(f"{text[:20]} is no finite number")
    return None


def _is_deep(value: object) -> bool:
    level = [value]
    for _ in range(_DEEPEST):
        level = [
            child
            for each in level
            for child in (each.values() if isinstance(each, dict) else each if isinstance(each, list) else ())
        ]
        if not level:
            return False
    return True
