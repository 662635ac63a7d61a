"""All settings, and what is made of them: ids, checks, needs, small forms, evidence. A new one is listed here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any, cast

from pytest_llmperf.settings.setting import NotClaimedError, Package, Setting, TrainSpec, claimed, equal, read_evidence
from pytest_llmperf.settings.spec import Spec
from pytest_llmperf.support.files import shipped
from pytest_llmperf.support.formats import first_n
from pytest_llmperf.support.user_input import hint

# Files of this folder; a few have a second setting.
_FILES = "precision attention liger loss lora compilation optimizer parallelism batch data arguments"
_KNOWN = {
    each.name: each
    for file in _FILES.split()
    for each in vars(import_module(f"{__package__}.{file}")).values()
    if isinstance(each, Setting)
}
_ORDER = shipped(__file__, "order.ini")["settings"]
SETTINGS, _IN_ID = (tuple(_KNOWN[name] for name in _ORDER[order].split()) for order in ("decided", "said"))


def words_in_id(spec: TrainSpec) -> Iterator[str]:
    """What an id says of every setting that is on."""
    for setting in _IN_ID:
        for name, words in setting.in_id.items():
            if callable(words):
                yield words(spec)
            elif _is_set(spec, name):
                yield words.format(getattr(spec, name))


def _is_set(spec: TrainSpec, name: str) -> bool:
    return bool(getattr(spec, name) != getattr(type(spec), name))


def value_problems(spec: TrainSpec) -> Iterator[str]:
    """Why values cannot be, a line each; fields are of their types. A ``SpecError`` where there is no such text."""
    for setting in SETTINGS:
        for name, least in setting.least.items():
            value = getattr(spec, name)
            if value is not None and value < least:
                or_none = ", or left out" if getattr(type(spec), name) is None else ""
                yield f"TrainSpec: {name}={value} must be at least {least}{or_none}"
        yield from setting.problems(spec)
        for name, known in setting.values.items():
            value = getattr(spec, name)
            if value not in known:
                yield f"TrainSpec: unknown {name} {value!r}{hint(value, known)}; known: {first_n(known, 8)}"


def clashes(spec: TrainSpec) -> Iterator[str]:
    """Why these settings cannot train together and what to do instead, a line each."""
    for setting in SETTINGS:
        for name in setting.switched:
            if _is_set(spec, name) and not getattr(spec, setting.switch):
                yield f"{name}={getattr(spec, name)!r} without {setting.switch}=True changes nothing"
        if line := setting.clash(spec):
            yield line


def packages(spec: TrainSpec) -> Iterator[Package]:
    """What it needs installed beside what every training does."""
    return (package for setting in SETTINGS if (package := setting.needs(spec)) is not None)


def missing_package(spec: Spec) -> str | None:
    """The package that its settings need and this environment does not have, and how to install it."""
    wanted = () if spec.is_script else packages(cast("TrainSpec", spec))
    missing = (package for package in wanted if find_spec(package.module) is None)
    return next((f"{spec.id} needs {package.name}: pip install {package.install}" for package in missing), None)


def why_skip(spec: Spec, *, num_gpus: int, num_cores: int) -> str | None:
    """Why it cannot run here, said before anything is launched; ``num_gpus`` 0 is the CPU."""
    if num_gpus and spec.gpus > num_gpus:
        return f"{spec.id} needs {spec.gpus} GPUs, this run may use {num_gpus} (--gpus)"
    if not num_gpus:
        if spec.gpus > num_cores:
            return f"{spec.id} needs {spec.gpus} ranks, this CPU runs {num_cores} at a time"
        ours = () if spec.is_script else SETTINGS
        if why := next((why for setting in ours if (why := setting.why_not_on_cpu(cast("TrainSpec", spec)))), None):
            return f"{spec.id}: {why}; run with --gpus {spec.gpus}"
    return missing_package(spec)


# A spec made small, and its plainest form: what parity trains in their place.
def small(spec: TrainSpec) -> TrainSpec:
    """``spec`` with a step of ``SEQUENCES`` short sequences, on as few ranks as show that they share it."""
    return _changed(spec, "small")


def plainest(spec: TrainSpec) -> TrainSpec:
    """The same small training with nothing that makes it fast: what is left decides what is learnt."""
    return _changed(spec, "small", "plain")


def in_fp32(spec: TrainSpec) -> TrainSpec:
    """``spec`` in fp32, where rounding hides least; attention by a kernel that has fp32 where its own has none."""
    return _changed(spec, "in_fp32")


def _changed(spec: TrainSpec, *forms: str) -> TrainSpec:
    """With the fields of each setting in these of its forms."""
    parts = [getattr(setting, form)(spec) for form in forms for setting in SETTINGS]
    return replace(spec, **{name: value for part in parts for name, value in part.items()})


# Evidence: what a training tells of itself, by setting; read from a record, and held against a spec.

#: What no setting asks for and each launch shows; a model of which a part is never trained declares it.
LEARNING = "learning"


@dataclass(frozen=True)
class RunEvidence:
    """What a run tells beside its settings."""

    device_type: str = "cpu"
    injected: str = ""
    """The faults that the environment asked for."""
    allocator_retries: int | None = None
    found: Mapping[str, Any] = field(default_factory=dict)
    """What the user's environment had set of all that a launch forces."""
    setup: Mapping[str, Any] = field(default_factory=dict)
    """By topic, the objects that trained (``worker/evidence.py``)."""
    uncollected: Mapping[str, str] = field(default_factory=dict)
    """What of the evidence could not be collected, and why."""
    other_ranks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """What other ranks saw differently, by name and then by rank."""
    remarks: Sequence[str] | None = None
    """What was asked for and is not done, a line each."""
    start: str | None = None
    """``warm`` or ``cold``."""
    ended: str | None = None
    slurm_nodes: str | None = None
    slurm_switches: str | None = None

    @property
    def is_on_gpu(self) -> bool:
        return self.device_type != "cpu"

    @property
    def torch(self) -> Mapping[str, Any]:
        """Settings of PyTorch that no environment variable says."""
        return dict(self.setup.get("torch", {}))


@dataclass(frozen=True)
class Evidence:
    """All that a training tells of itself."""

    run: RunEvidence
    parts: Mapping[str, Any]
    """By the name of each setting that tells any: attributes, too."""

    def __getattr__(self, name: str) -> Any:
        parts: Mapping[str, Any] = vars(self).get("parts", {})
        if name in parts:
            return parts[name]
        raise AttributeError(f"evidence has no {name!r}")

    @classmethod
    def read(cls, stored: Mapping[str, Any]) -> Evidence:
        """As a record holds it, of any age."""
        parts = {each.name: read_evidence(each.evidence, stored) for each in SETTINGS if each.evidence}
        return cls(run=read_evidence(RunEvidence, stored), parts=parts)


def declarable() -> tuple[str, ...]:
    """The settings that can be declared to change nothing, since evidence tells."""
    return (*(name for setting in SETTINGS for name in setting.checks), LEARNING)


def undeclarable(inactive: frozenset[str]) -> Iterator[str]:
    """A line for each name that cannot be declared inactive."""
    known = declarable()
    for name in sorted(inactive.difference(known)):
        yield f"{name!r} cannot be declared inactive{hint(name, known) or '; known: ' + ', '.join(known)}"


def contradictions(spec: TrainSpec, evidence: Evidence, inactive: frozenset[str]) -> Iterator[str]:
    """A line for each setting that was not what ``spec`` asked for; of ``inactive`` ones, for each that was. What is
    not claimed contradicts nothing, but where the spec asks for more than the default or collecting it failed."""
    for setting in SETTINGS:
        for name, check in setting.checks.items():
            try:
                if isinstance(check, str):
                    seen = claimed(getattr(getattr(evidence, setting.name), name), name)
                    line = equal(check, getattr(spec, name), seen)
                else:
                    line = check(spec, evidence)
            except NotClaimedError as missing:
                if _is_set(spec, name) or evidence.run.uncollected:
                    failed = "; ".join(f"{own}: {why}" for own, why in evidence.run.uncollected.items())
                    why = f" (collecting it failed: {failed})" if failed else ""
                    yield f"no evidence of {missing} was recorded{why}"
                continue
            declared = name in inactive and getattr(spec, name) not in (False, "no")
            if declared and line is None:
                yield f"{name} was declared to be inactive, and was active"
            elif line is not None and not declared:
                yield line


def lost(
    spec: TrainSpec, launches: Sequence[Evidence], reference: Sequence[Evidence], inactive: frozenset[str]
) -> Iterator[str]:
    """A line for each setting that did more in ``reference``, launches of a baseline, than it does in ``launches``."""
    for setting in SETTINGS:
        if inactive.isdisjoint(setting.checks) and (line := setting.lost(spec, launches, reference)):
            yield line
