"""Expectation: how long a step should take on a kind of GPU, by what other cases took, there and on other kinds. Pure.

A step is the sum of its kinds of work, each scaled by itself from the most alike cases. Another kind of GPU's time is
worth what cases that both have say of that work; without any, what the chips gave to the same products and copies: a
range. How far all that may be off is what it is off of each stored case, told by the others."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from operator import mul
from typing import TypeAlias

from pytest_llmperf.analysis.formulas import peak_bandwidth, peak_flops
from pytest_llmperf.analysis.likely_causes import CATEGORIES, PATTERNS, likely_causes
from pytest_llmperf.analysis.step_difference import DATA, HOST, ORDER, parts_of
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.trace import StaticStep, Trace
from pytest_llmperf.settings.batch import DURATION
from pytest_llmperf.settings.data import is_uneven
from pytest_llmperf.settings.lora import adapted_layers, trained_weights
from pytest_llmperf.settings.optimizer import update_flops
from pytest_llmperf.settings.train_spec import TrainSpec
from pytest_llmperf.support.formats import compact

MATRIX, ATTENTION, NORM, LOSS, OPTIMIZER, COMMUNICATION, COPIES, ELEMENTWISE = CATEGORIES
Parts = Mapping[str, float]
"""By kind of work."""
Error: TypeAlias = "tuple[Case, float, float]"
"""Of a case: how unlike its nearest is, and by how much, as a logarithm, that is off."""

# How unlike two cases are, as the logarithm of what one says of the other: another kind of GPU, another model, a
# setting, and once more where that decides the kind of work, twice as many tokens or as long sequences. Ratios of two
# kinds of GPU differ less from case to case. Chosen by how far off stored cases are (``tools/expected_rates.py``).
_KIND, _MODEL, _SETTING, _DECIDES, _DOUBLED, _RATIO = 0.2, 12.0, 5.0, 5.0, 1.0, 0.5

_SIZES = "model micro_batch_size sequence_length gradient_accumulation_steps seed weights text split tokenizer"
_NO_SETTINGS = frozenset({*_SIZES.split(), *DURATION.fields})
# That so many are no further off is told; cases whose nearest is about as unlike judge one another, if so many.
_INSIDE, _ALIKE, _FEWEST = 0.9, 2.5, 10
# Products that take as long as a byte moved beside them (chips give 200 to 290 for one, some of it hidden), and where
# sequences are so long, fused attention reads and writes for as long as it computes.
_MOVED, _A_BYTE, _SHORT = "moved", 125.0, 800
# A step of so many times less or more arithmetic than any stored one is nothing that they tell of.
_BEYOND = 8
# Where these differ, a case says nothing of another: what adapters take, and how tokens come to their experts.
_APART = ("lora", "experts")
# And of what is asked some case must have each of these: others' kernels and exchanges tell nothing of its own.
_CHOSEN = ("tf32", "fp8", "attention", "sdpa_backend", "loss", "parallelism", "hub_kernels")
# Of a step: what is lost, or idle, below this is told to nobody; and so many parts at most.
_TOLD, _MOST_PARTS = 0.03, 2


@dataclass(frozen=True, kw_only=True)
class Case:
    """A case on one kind of GPU; without seconds it is what is asked for."""

    spec: TrainSpec
    kind: str
    step_seconds: float = 0.0
    trace: Trace | None = None
    static: StaticStep | None = None
    """Of any machine: no chip changes it."""
    rates: tuple[float, float] | None = None
    """What the chip gave to products and to copies that never change."""
    scaled: Parts = field(default_factory=dict)
    """Seconds by kind of work, where no trace tells."""

    @cached_property
    def digest(self) -> str:
        return self.spec.digest

    @cached_property
    def settings(self) -> frozenset[tuple[str, str]]:
        chosen = [each for each in self.spec.to_dict().items() if each[0] not in _NO_SETTINGS]
        return frozenset((name, repr(each).replace("fp16", "bf16")) for name, each in chosen)  # both are as fast

    @cached_property
    def tokens(self) -> int:
        """Of a step and GPU."""
        return self.spec.sequences_per_step * self.spec.sequence_length // self.spec.gpus

    @cached_property
    def parts(self) -> Parts:
        """Of its steps, of which traced ones differ by what their host has to do beside."""
        if not self.trace:
            return self.scaled
        parts = dict.fromkeys(ORDER, 0.0) | parts_of(self.trace)
        parts[HOST] = max(0.0, parts[HOST] + self.step_seconds - sum(parts.values()))
        return _of_sum(parts, self.step_seconds)

    @cached_property
    def work(self) -> Parts | None:
        """How much there is of each kind in a step of one GPU; ``None``: nothing tells."""
        spec, tokens, sizes = self.spec, self.tokens, self.spec.architecture.sizes
        goes_to_the_host = spec.offloading != "no" or "paged" in spec.optimizer  # nobody counts that
        if sizes is None or is_uneven(spec) or goes_to_the_host or not (self.static or spec.architecture.geometry):
            return None
        layers, again = tokens * sizes.num_layers, spec.gradient_checkpointing and spec.checkpointing_policy == "full"
        scores = float(layers * spec.sequence_length * sizes.num_heads * sizes.head_size)
        width = 4 * sizes.hidden_size + sizes.num_feed_forward_matrices * sizes.feed_forward_size
        if self.static:
            products = float(sum(n for name, n in self.static.flops.items() if "attention" not in name))
        else:
            each = sizes.weights * (8.0 if again else 6.0) - (spec.unmade_flops_per_token or 0.0)
            products = tokens * each + 12 * scores * (spec.attention == "eager")
        if spec.attention != "eager":
            scores *= (1 + _SHORT / spec.sequence_length) * (1 + again * 2 / 7)
        own, usual = (peak_flops(self.kind, each) for each in (spec.compute_precision, "bf16"))
        speed, is_fp8 = own / usual if own and usual else 1.0, spec.fp8 != "no"
        # What goes into products of fp8 and comes out is cast; the vocabulary's are none.
        cast = is_fp8 * sum(into + out for _, into, out in spec.architecture.linear_layers())
        products += is_fp8 * (speed - 1) * 6 * tokens * sizes.vocabulary_size * sizes.hidden_size
        passes, trained = layers * (1 + spec.gradient_checkpointing / 3), float(trained_weights(spec) or 0)
        into = sum(width for _, width, _ in adapted_layers(spec))
        outcomes = sum(output for *_, output in adapted_layers(spec))
        # Adapters pass over both thrice; each chunk of Liger's loss, as many as words a feature, adds to a gradient.
        chunked = (spec.liger and spec.loss == "model") * spec.gradient_accumulation_steps * sizes.vocabulary_size**2
        moved = _A_BYTE * 6 * (passes * (into + outcomes) + chunked / (1 + spec.lora))
        return {
            **dict.fromkeys(ORDER, float(layers * width)),
            NORM: passes * (width + cast + into * (spec.lora_dropout > 0)),
            ELEMENTWISE: passes * (width + 2 * cast + 5 * (into + outcomes)),
            # An update's are in bf16; what is counted of a step has them already.
            MATRIX: products / speed + (0.0 if self.static else update_flops(spec)) + moved,
            _MOVED: moved,
            ATTENTION: scores,
            LOSS: float(tokens * sizes.vocabulary_size),
            OPTIMIZER: trained / (spec.gpus if spec.parallelism != "ddp" else 1),
            # Shards of what stays as it is are gathered all the same.
            COMMUNICATION: trained if spec.parallelism == "ddp" else float(sizes.weights),
            HOST: float(spec.gradient_accumulation_steps * sizes.num_layers),
            DATA: float(spec.gradient_accumulation_steps),
        }

    def is_of(self, other: Case) -> bool:
        """Whether both are of one model."""
        return self.spec.architecture.fingerprint == other.spec.architecture.fingerprint

    def is_comparable(self, other: Case) -> bool:
        return all(getattr(self.spec, name) == getattr(other.spec, name) for name in _APART)

    def far(self, other: Case) -> Parts:
        """How unlike ``other`` is, by kind of work."""
        differ = {name for name, _ in self.settings ^ other.settings}
        longer = (self.tokens / other.tokens, self.spec.sequence_length / other.spec.sequence_length)
        far = _SETTING * len(differ) + _DOUBLED * sum(abs(math.log2(each)) for each in longer)
        far += _MODEL * (not self.is_of(other)) + _KIND * (self.kind != other.kind)
        decided = {name: [*filter(one.fullmatch, differ)] for name, one in PATTERNS["decided by"].items()}
        return {name: far + _DECIDES * len(fields) for name, fields in decided.items()}


@dataclass(frozen=True, kw_only=True)
class Expectation:
    asked: Case
    parts: Parts
    """Seconds by kind of work."""
    nearest: Case
    """That said most of it, and how unlike it is."""
    far: float
    error: float = 0.0
    """As a logarithm: nine of ten stored cases that others told of as well are no further off."""
    judged_by: int = 0
    """How many of them there are, of all models."""

    @property
    def step_seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def rate(self) -> float:
        """Tokens/s per GPU."""
        return self.asked.tokens / self.step_seconds

    @property
    def range(self) -> tuple[float, float]:
        return self.rate / math.exp(self.error), self.rate * math.exp(self.error)

    @property
    def mfu(self) -> float | None:
        """The use of the chip; ``None``: its peak or the model's arithmetic is not known."""
        spec = self.asked.spec
        peak = peak_flops(self.asked.kind, spec.compute_precision)
        flops, unmade = spec.architecture.flops_per_token(spec.sequence_length), spec.unmade_flops_per_token
        return self.rate * (flops - unmade) / peak if peak and flops and unmade is not None else None


def expected(asked: Case, cases: Sequence[Case], errors: Sequence[Error]) -> Expectation | None:
    """What ``cases``, which are filled and judged by ``errors``, say of ``asked``; ``None``: nothing."""
    others = [one for one in cases if (one.kind, one.digest) != (asked.kind, asked.digest)]
    products = [(one.work or {})[MATRIX] for one in others if one.is_comparable(asked)]
    found = estimated(asked, others)
    if found is None or not min(products) / _BEYOND <= (asked.work or {})[MATRIX] <= max(products) * _BEYOND:
        return None
    return with_error(found, [each for each in errors if each[0].digest != asked.digest])


def with_error(found: Expectation, errors: Sequence[Error]) -> Expectation:
    """``found`` by the errors of cases that are known as well as it, or of all that are known as badly at least. Those
    of another model say no more of this one than one does: together they count as one."""
    near = [each for each in errors if abs(each[1] - found.far) <= _ALIKE]
    if len(near) < _FEWEST:
        near = sorted(errors, key=lambda each: abs(each[1] - found.far))[:_FEWEST]
    near = sorted(near, key=lambda each: each[2])
    models = Counter(one.spec.architecture.slug for one, *_ in near)
    sums = [*accumulate(1.0 if one.is_of(found.asked) else 1 / models[one.spec.architecture.slug] for one, *_ in near)]
    # The case itself is one more, of which nobody knows where it is among them.
    wanted = bisect_left(sums, _INSIDE * (sums[-1] + 1)) if sums else 0
    error = near[min(wanted, len(near) - 1)][2] if near else 0.0
    return replace(found, error=found.error + error, judged_by=len(near))


def judged(cases: Sequence[Case]) -> list[Error]:
    """How unlike each case's nearest is, and how far off: told by all others, other settings and other models."""
    found, chosen = [], _CHOSEN if len(cases) >= _FEWEST else ()  # of few, all judge
    for case in cases:
        own = [one for one in cases if one is not case]
        settings = [one for one in own if one.digest != case.digest]
        others = [one for one in settings if not one.is_of(case)]
        told = (estimated(case, some, chosen) for some in (own, settings, others))
        found += [(case, each.far, abs(math.log(each.step_seconds / case.step_seconds))) for each in told if each]
    return found


def filled(stored: Sequence[Case]) -> list[Case]:
    """Those that can serve; what no trace tells of one is of which work its seconds were: the others say that."""
    usable = [one for one in stored if one.work and one.step_seconds]
    traced = [one for one in usable if one.trace]
    found = list(traced)
    for one in usable:
        told = None if one.trace else estimated(one, [each for each in traced if each.kind == one.kind], ())
        found += [replace(one, scaled=_of_sum(told.parts, one.step_seconds))] if told else []
    return found


def estimated(asked: Case, cases: Sequence[Case], chosen: Sequence[str] = _CHOSEN) -> Expectation | None:
    """What ``cases``, which are filled, say of ``asked``; its error is of what nobody has measured alone."""
    work = asked.work
    cases = [one for one in cases if one.is_comparable(asked)]
    is_known = all(any(getattr(asked.spec, name) == getattr(one.spec, name) for one in cases) for name in chosen)
    if not (work and cases and is_known):
        return None
    ratios = {asked.kind: dict.fromkeys(ORDER, (1.0, 0.0))}
    ratios |= {kind: told for kind in {one.kind for one in cases} - {*ratios} if (told := _ratios(asked, kind, cases))}
    if not (known := [one for one in cases if one.kind in ratios]):
        return None
    far, parts = [asked.far(one) for one in known], {}
    for name in ORDER:
        least = min(each[name] for each in far)
        weights = [math.exp(least - each[name]) / one.step_seconds for one, each in zip(known, far, strict=True)]
        taken = math.fsum(map(mul, weights, (one.parts[name] * ratios[one.kind][name][0] for one in known)))
        parts[name] = work[name] * taken / math.fsum(map(mul, weights, ((one.work or {})[name] for one in known)))
    nearest = min(range(len(known)), key=lambda number: far[number][MATRIX])
    unknown = ratios[known[nearest].kind]
    spread = sum(seconds * unknown[name][1] for name, seconds in parts.items()) / sum(parts.values())
    return Expectation(asked=asked, parts=parts, nearest=known[nearest], far=far[nearest][MATRIX], error=spread)


def _ratios(asked: Case, kind: str, cases: Sequence[Case]) -> dict[str, tuple[float, float]] | None:
    """By kind of work, how much longer it takes on ``asked``'s kind of GPU than on ``kind``, and as a logarithm how
    much more or less that may be, where no case has told."""
    own = {one.digest: one for one in cases if one.kind == asked.kind and one.trace}
    if not (pairs := [(one, own[one.digest]) for one in cases if one.kind == kind and one.trace and one.digest in own]):
        measured = next((one.rates for one in cases if one.kind == kind and one.rates), None), asked.rates
        there, here = measured if all(measured) else (published_rates(kind), published_rates(asked.kind))
        if not (there and here):
            return None
        products, copies = (then / now for then, now in zip(there, here, strict=True))
        moved = (asked.work or {})[_MOVED] / (asked.work or {})[MATRIX]
        # Scores that are written are bound by the memory, fused ones by products; what is left is, or is not.
        scores = copies if asked.spec.attention == "eager" else products
        between = math.sqrt(products * copies), abs(math.log(products / copies)) / 2
        told = {MATRIX: products ** (1 - moved) * copies**moved, ATTENTION: scores, HOST: 1.0, DATA: 1.0}
        return dict.fromkeys(ORDER, between) | {name: (each, 0.0) for name, each in told.items()}
    far, found = [asked.far(here) for _, here in pairs], {}
    for name in ORDER:
        least, alike = min(each[name] for each in far), 0.0 if name == HOST else _RATIO  # a host is as good for all
        both = zip(far, pairs, strict=True)
        weights = [math.exp(alike * (least - each[name])) / one.step_seconds for each, (one, _) in both]
        then, now = (sum(map(mul, weights, (one.parts[name] for one in side))) for side in zip(*pairs, strict=True))
        found[name] = (now / then if then else 1.0), 0.0
    return found


def published_rates(kind: str) -> tuple[float, float] | None:
    """Of products in bf16 and of copies."""
    products, copies = peak_flops(kind, "bf16"), peak_bandwidth(kind)
    return (products, copies) if products and copies else None


def _of_sum(parts: Parts, seconds: float) -> dict[str, float]:
    scale = seconds / sum(parts.values())
    return {name: each * scale for name, each in parts.items()}


def standing(found: Expectation, launch: Launch) -> str:
    """What ``launch``, of the same work, reaches of what was ``found``, and where the rest is lost, as far as its trace
    tells: ``plausible: 59k tokens/s per GPU, expected 57.1k to 60.8k``."""
    rate, (low, high) = launch.tokens_per_second_per_gpu, found.range
    text = f"{compact(rate)} tokens/s per GPU, expected {compact(low)} to {compact(high)}"
    if low <= rate <= high:
        return f"plausible: {text}"
    text = f"at {rate / found.rate * 100:.0f} % of what is expected: {text}"
    if rate > high or not launch.trace:
        return text
    seconds = found.asked.tokens / rate
    parts = replace(found.asked, step_seconds=seconds, trace=launch.trace).parts
    more = {name: (each - found.parts[name]) / seconds for name, each in parts.items() if name != HOST}
    worst = [name for name in sorted(more, key=lambda name: -more[name]) if more[name] >= _TOLD][:_MOST_PARTS]
    told = [text]
    if worst:
        causes = likely_causes(found.nearest.trace, launch.trace) if found.nearest.trace else ()
        lost = ", ".join(f"{name} {more[name] * 100:.0f} %" for name in worst)
        told.append(f"lost in {lost} of a step" + "".join(f" ({cause})" for cause in causes[:1]))
    if (idle := parts[HOST] / seconds) >= _TOLD:
        told.append(f"{idle * 100:.0f} % idle for the host")
    return "; ".join(told)
