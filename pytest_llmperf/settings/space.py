"""Space: all that can be made of one spec by the choices of some axes, and why the rest cannot."""

from __future__ import annotations

import itertools
import math
import random
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from pytest_llmperf.settings.arguments import MAPPINGS, canonical
from pytest_llmperf.settings.batch import AXIS as SIZES
from pytest_llmperf.settings.batch import DURATION, SIZE
from pytest_llmperf.settings.liger import LOSS, liger_kernels
from pytest_llmperf.settings.optimizer import OPTIMIZERS
from pytest_llmperf.settings.precision import PRECISIONS, precision_fields
from pytest_llmperf.settings.registry import SETTINGS
from pytest_llmperf.settings.setting import Axis, Choice, Search, SpecError
from pytest_llmperf.settings.spec import ScriptSpec, Spec, blanks, filled, within
from pytest_llmperf.settings.train_spec import TrainSpec
from pytest_llmperf.support.user_input import hint

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

#: A larger space is not looked at as a whole: so many of it are, chosen at random, with all that differ from its spec
#: by one choice. To make a spec takes an eighth of a millisecond.
MOST = 20_000
#: Before memory and step times are known, nothing is tried that is larger than so many times the search's beginning.
LARGER = 4

_SEED = 15


class Candidates(NamedTuple):
    """What of a space can be trained, nearest to its own spec first and no two alike; and why what cannot be."""

    specs: tuple[Any, ...]
    refused: Counter[str]
    unseen: int


@dataclass(frozen=True)
class Space:
    """The choices of ``axes``, over ``base``; a ``SpecError`` where one has no choice, or two set one field."""

    base: Spec
    axes: tuple[Axis, ...]
    sized: str = SIZE
    """What choices call the micro-batch."""

    def __post_init__(self) -> None:
        setter: dict[str, str] = {}
        for axis in self.axes:
            if not axis.choices:
                raise SpecError(f"space: axis {axis.name!r} has no choice, expected one at least")
            for name in axis.fields:
                if (first := setter.setdefault(name, axis.name)) != axis.name:
                    raise SpecError(f"space: axes {first!r} and {axis.name!r} both set {name}, expected one of them")

    @property
    def size(self) -> int:
        """How many combinations there are, those included that cannot be."""
        return math.prod(len(axis.choices) for axis in self.axes)

    def candidates(self) -> Candidates:
        """Each combination as a spec; of a space of more than ``MOST``, so many of them and its recipes."""
        found, refused = dict[Spec, None](), Counter[str]()
        combinations, values = self._combinations(), self.values(self.base)
        for choices in combinations:
            made = self._made(choices, values)
            if isinstance(made, Spec):
                found[made] = None
            else:
                refused[str(made).partition(": ")[2] or str(made)] += 1  # without the id that it begins with
        specs = found | dict.fromkeys(itertools.chain(*self.recipes()))
        return Candidates(tuple(specs), refused, self.size - len(combinations) - (len(specs) - len(found)))

    def spec(self, choices: Sequence[Choice], values: Mapping[str, Any] | None = None) -> Any:
        """The base, or a spec of these ``values``, with these choices; a ``SpecError`` where it cannot be."""
        fields = {name: value for choice in choices for name, value in choice.fields}
        return TrainSpec(**{**(values or self.base.to_dict()), **fields})

    def neighbours(self, spec: Spec) -> Iterator[Any]:
        """Each that differs from ``spec`` by one choice, and can be."""
        yield from (other for _, other in self._beside(spec) if isinstance(other, Spec))

    def no_neighbours(self, spec: Spec, *, at_all: bool = False) -> Iterator[str]:
        """Each choice beside which ``spec`` cannot be otherwise as it is, or that cannot be ``at_all``, and why."""
        for name, why in self._beside(spec):
            if isinstance(why, SpecError) and not (at_all and why.is_clash):
                yield f"{name} cannot be: {why}"

    def _beside(self, spec: Spec) -> Iterator[tuple[str, Spec | SpecError]]:
        values = self.values(spec)
        for axis in self.axes:
            for choice in (one for one in axis.choices if not one.holds(values)):
                yield f"{axis.name}={choice.name}", self._made([choice], values)

    def _made(self, choices: Sequence[Choice], values: Mapping[str, Any] | None = None) -> Any:
        """The spec, or why it cannot be. What only the choices set that these replace may be left out."""
        try:
            return self.spec(choices, values)
        except SpecError as error:
            own, axes = values or {}, [axis for axis in self.axes if {*axis.choices} & {*choices}]
            out = {name for axis in axes for one in axis.choices if one.holds(own) for name in dict(one.fields)}
            with suppress(SpecError):
                return self.spec(choices, {name: value for name, value in own.items() if name not in out})
            return error

    def values(self, spec: Spec) -> Mapping[str, Any]:
        """What ``spec`` has of the fields that choices set."""
        return spec.to_dict()

    def choices_of(self, spec: Spec) -> dict[str, str]:
        """By axis, the name of the choice that ``spec`` has made, if any; of several the one that sets most."""
        values, found = self.values(spec), dict[str, str]()
        for axis in self.axes:
            if held := [choice for choice in axis.choices if choice.holds(values)]:
                found[axis.name] = max(held, key=lambda choice: len(choice.fields)).name
        return found

    @property
    def first(self) -> Any:
        """What the base itself has chosen; of an axis of which it has chosen nothing, the first choice."""
        return self.spec(self._nearest())

    @property
    def scales(self) -> Mapping[str, Sequence[str]]:
        """Axes of numbers: a search goes along them from one to the next."""
        return {}

    def recipes(self, over: Spec | None = None) -> tuple[tuple[Any, ...], ...]:
        """What does well elsewhere, with all else that ``over`` has (left out: the first). For each recipe its specs,
        the best first and of each the largest micro-batch first, up to ``LARGER`` times the base's or twice that of
        ``over``; where ``over`` follows it already, ``over`` between what is better and what is not."""
        base, over = self.base, over or self._made(self._nearest())
        if not (isinstance(base, TrainSpec) and isinstance(over, Spec)):
            return ()
        values, most, found = self.values(over), max(LARGER * base.micro_batch_size, 2 * over.micro_batch_size), []
        sized = next((axis.choices for axis in self.axes if SIZE in axis.fields), ())
        sizes = [[size] for size in sized if dict(size.fields).get(SIZE, 0) <= most] if sized else [[]]
        may = frozenset[str]().union(*(axis.fields for axis in self.axes))
        for alternatives in recipes(base, may):
            specs = dict[Spec, None]()
            for recipe in alternatives:
                choices = [choice for axis in self.axes if (choice := followed(recipe, axis)) is not None]
                made = (self._made([*choices, *size], values) for size in sizes)
                able = [spec for spec in made if isinstance(spec, Spec)]
                if all(choice.holds(values) for choice in choices):
                    able = [over] if choices else []
                specs |= dict.fromkeys(sorted(able, key=lambda spec: -spec.micro_batch_size))
            found.append(tuple(specs))
        return tuple(found)

    def _combinations(self) -> Sequence[tuple[Choice, ...]]:
        first = self._nearest()
        if self.size <= MOST:
            return [first, *(one for one in itertools.product(*(axis.choices for axis in self.axes)) if one != first)]
        chosen = dict.fromkeys([first])
        for place, axis in enumerate(self.axes):
            chosen |= dict.fromkeys((*first[:place], choice, *first[place + 1 :]) for choice in axis.choices)
        chance = random.Random(_SEED)  # noqa: S311 - the same space gives the same candidates
        while len(chosen) < MOST:
            chosen[tuple(chance.choice(axis.choices) for axis in self.axes)] = None
        return [*chosen]

    def _nearest(self) -> tuple[Choice, ...]:
        values = self.values(self.base)
        return tuple(next((one for one in axis.choices if one.holds(values)), axis.choices[0]) for axis in self.axes)


# Words that are the micro-batch, if nobody says which one is.
_SIZED = (SIZE, "micro_batch", "batch_size", "batch")


@dataclass(frozen=True, kw_only=True)
class ScriptSpace(Space):
    """The words of a training command, in braces where they stand in it, as axes. The one of the micro-batch is a field
    of its specs; tokens that are told are those of a step where the search begins."""

    base: ScriptSpec
    command: str
    root: Path
    begins: Mapping[str, Any]
    """By word."""
    _words: dict[Spec, Mapping[str, Any]] = field(default_factory=dict, compare=False)
    """Of each spec that was made."""

    @classmethod
    def read(cls, told: Mapping[str, Any], path: Path, root: Path, gpus: int = 0) -> ScriptSpace:
        """Of a TOML file: each word's values in order, ``[start]``, and which word is the ``micro_batch``. ``told`` are
        fields of a ScriptSpec, which has ``gpus`` where it says none. A ``SpecError`` of one line."""
        document, command = _document(path, "batch = [8, 16]"), told["command"]
        told = {**({"gpus": gpus} if gpus and "gpus" in blanks(command) else {}), **told}
        start, words = document.pop("start", {}), blanks(command) - {"gpus", *told}
        # A list is an axis: of a word that is called so.
        size = document.pop("micro_batch", "") if isinstance(document.get("micro_batch"), str) else ""
        lists = document.pop("axes", document)
        try:
            if not isinstance(start, Mapping) or not isinstance(lists, Mapping):
                raise SpecError("[axes] and [start] are tables of words, e.g. batch = [8, 16] and batch = 8")
            if lists is not document and document:
                raise SpecError(f"unknown {next(iter(document))!r}, expected [axes], [start] and micro_batch = 'word'")
            axes = tuple(_axis(name, values, words) for name, values in lists.items())
            if missing := sorted(words.difference(*(axis.fields for axis in axes))):
                expected = f"expected e.g. {missing[0]} = [8, 16]{hint(missing[0], lists)}"
                raise SpecError(f"no axis is of the command's {{{missing[0]}}}, {expected}")
            first = {name: value for axis in axes for name, value in axis.choices[0].fields}
            held = {pair for axis in axes for choice in axis.choices for pair in choice.fields}
            for name, value in start.items():
                if (name, value) not in [*held]:
                    raise SpecError(f"[start] has {name} = {value!r}, which is no choice of its axis")
            for axis, choice in ((one, choice) for one in axes for choice in one.choices):
                if missing := sorted(axis.fields.difference(dict(choice.fields))):
                    lacks = f"axis {axis.name!r}: choice {choice.name!r} sets no {{{missing[0]}}}, and another one does"
                    raise SpecError(f"{lacks}; let each set the same words, to '' where one is to be left out")
            if size and size not in words:
                raise SpecError(f"micro_batch = {size!r} is no word of the command{hint(size, words)}")
        except SpecError as error:
            raise SpecError(f"{path}: {error}") from None
        begins = {**first, **start}
        sized = size or next((word for word in _SIZED if word in words), SIZE)
        base = ScriptSpec(**{SIZE: begins.get(sized, 1), **told, "command": filled(command, begins)})
        return cls(base=base, axes=axes, sized=sized, command=command, root=root, begins=begins)

    def spec(self, choices: Sequence[Choice], values: Mapping[str, Any] | None = None) -> Spec:
        words = {**(values or self.begins), **{name: value for choice in choices for name, value in choice.fields}}
        size, given = words.get(self.sized, self.base.micro_batch_size), self.base.given_tokens
        tokens: str | int = self.base.tokens
        if given is not None and isinstance(size, int):  # else it is refused
            tokens = given * size // self.base.micro_batch_size
            tokens = f"sequences:{tokens}" if self.base.rate_unit == "sequences" else tokens
        command = filled(self.command, {**words, self.sized: f"{{{SIZE}}}"}).strip()
        made = within(self.base.changed(command=command, micro_batch_size=size, tokens=tokens), self.root)
        self._words[made] = words
        return made

    def values(self, spec: Spec) -> Mapping[str, Any]:
        return self._words.get(spec, self.begins)

    @property
    def scales(self) -> Mapping[str, Sequence[str]]:
        found = dict[str, Sequence[str]]()
        for axis in self.axes:
            values: list[Any] = [value for choice in axis.choices for _, value in choice.fields]
            are_numbers = len(axis.fields) == 1 and all(type(value) in (int, float) for value in values)
            if are_numbers and values in (sorted(values), sorted(values, reverse=True)):
                found[axis.name] = [choice.name for choice in axis.choices]
        return found


# A space of one's own: axes as TOML, or as data in Python, made the same way.
_KNOWN = tuple(one.name for one in fields(TrainSpec))


def read_axes(path: Path) -> tuple[Axis, ...]:
    """The axes of a TOML file; a ``SpecError`` of one line where it cannot be read, or says none."""
    document = _document(path, "[axes] and below it micro_batch_size = [8, 16]")
    try:
        unknown = [name for name in document if name != "axes"]
        if unknown or not document:
            what = f"unknown {unknown[0]!r}" if unknown else "it is empty"
            raise SpecError(f"{what}, expected one table [axes], e.g. micro_batch_size = [8, 16]")
        return axes_of(document["axes"])
    except SpecError as error:
        raise SpecError(f"{path}: {error}") from None


def _document(path: Path, example: str) -> dict[str, Any]:
    try:
        return dict(tomllib.loads(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        what = "correct it" if path.is_file() else "name a file that has it"
        raise SpecError(f"{path}: no space could be read ({why}); expected TOML, e.g. {example}: {what}") from None


def axes_of(values: object) -> tuple[Axis, ...]:
    """Axes as data: by field its values, or by an own name choices of several fields; ``SpecError`` of one line."""
    if not isinstance(values, Mapping) or not values:
        raise SpecError("a space needs axes, by field: {'micro_batch_size': [8, 16], 'liger': [False, True]}")
    return tuple(_axis(str(name), choices) for name, choices in values.items())


def _axis(name: str, choices: object, words: Collection[str] | None = None) -> Axis:
    """Of these ``words`` of a command; else of a TrainSpec's fields."""
    if isinstance(choices, Mapping):
        example = "off = { liger = false }" if words is None else "small = { batch = 8 }"
        if not choices:
            raise SpecError(f"axis {name!r} has no choice, expected one at least, e.g. {example}")
        if not all(isinstance(one, Mapping) and one for one in choices.values()):
            raise SpecError(f"axis {name!r}: each choice sets {'words' if words else 'fields'}, e.g. {example}")
        return Axis.of(name, {str(word): dict(_fields(name, one, words)) for word, one in choices.items()})
    if not isinstance(choices, list | tuple) or not choices:
        raise SpecError(f"axis {name!r} is {choices!r}, expected a list of values, e.g. [8, 16]")
    for place, value in enumerate(choices):
        if any(type(value) is type(other) and value == other for other in choices[:place]):
            raise SpecError(f"axis {name!r} has {value!r} twice, expected each value once")
    named = Axis.over(name, choices).choices
    return Axis.of(name, {choice.name: dict(_fields(name, dict(choice.fields), words)) for choice in named})


def _fields(axis: str, values: Mapping[str, Any], words: Collection[str] | None) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if words is not None:
            if name not in words:
                raise SpecError(f"axis {axis!r}: the command has no {{{name}}}{hint(name, words)}")
            if not isinstance(value, str | int | float):
                raise SpecError(f"axis {axis!r} has {value!r}, expected text, a number, true or false")
            yield name, value
            continue
        if name == "model":
            raise SpecError(f"axis {axis!r} sets the model, expected fields that train the same one")
        if name in DURATION.fields:
            raise SpecError(f"axis {axis!r} sets {name}, expected what is trained: how it is measured is the search's")
        if name == "precision":  # the fixture's word for three fields
            yield from precision_fields(value).items()
        elif name in _KNOWN:
            yield name, canonical(name, value) if name in MAPPINGS else value
        else:
            raise SpecError(f"axis {axis!r}: TrainSpec has no field {name!r}{hint(name, _KNOWN)}")


# The axes of a spec of which nobody has said what may change: what makes training faster and not different.

#: What ``allowed`` may name: of these trainings none need learn as the others do.
ALLOWED = (*PRECISIONS, "fp8", *OPTIMIZERS)


def default_axes(
    base: TrainSpec,
    *,
    on_cpu: bool,
    fixed: Iterable[str] = (),
    allowed: Iterable[str] = (),
    global_batch: int | None = None,
) -> tuple[Axis, ...]:
    """What may change of ``base`` on ``base.gpus`` GPUs; ``SpecError``: an unknown word, or a batch they cannot share.
    ``fixed``: fields that stay as they are, with all that is decided together with them. ``allowed``: trainings beside
    its own, by the words of ``ALLOWED``. ``global_batch``: sequences of all ranks for one step, by accumulation."""
    words = tuple(dict.fromkeys(allowed))
    for word in words:
        if word not in ALLOWED:
            raise SpecError(f"allowed {word!r}{hint(word, ALLOWED)}; known: precisions, fp8 and names of optimizers")
    search = Search(on_cpu, words, frozenset(fixed), global_batch)
    axes = [axis for setting in SETTINGS if (axis := setting.axis(base, search)) is not None]
    # Sizes have to be decided even where there is one: accumulation makes up for what a micro-batch lacks.
    needed = SIZES if global_batch is not None else ""
    free = [axis for axis in axes if len(axis.choices) > 1 and not axis.fields & search.fixed]
    return tuple(axis for axis in axes if axis in free or axis.name == needed)


# Recipes: choices that do well together wherever they were tried, which a search tries before it knows anything.
def recipes(base: TrainSpec, may: Collection[str]) -> tuple[tuple[Mapping[str, Any], ...], ...]:
    """Of a model like ``base``'s, of which the fields ``may`` change: of each recipe fields of a TrainSpec, the best
    first. Liger and a compiler fuse the same, but for the loss: compiled layers leave it out, so that a whole model is
    compiled where Liger has none. Its graph makes the mask that SDPA reads and is slower for it; FlashAttention has
    none."""
    layers = {"torch_compile": True, "torch_compile_scope": "layers", "torch_compile_mode": "default"}
    fused_step = {"optimizer": "adamw_torch_fused"}
    if not (kernels := liger_kernels(base)):
        whole = {**layers, "torch_compile_scope": "model", **fused_step}
        return ({**layers, **fused_step},), tuple({**whole, "attention": one} for one in ("flash_attention_2", "sdpa"))
    loss = {"liger": True, "liger_kernels": LOSS} if "liger_kernels" in may and LOSS in kernels else {"liger": False}
    plain = {"torch_compile": False, "liger": True, "liger_kernels": "all"}
    return ({**plain, **fused_step},), ({**layers, **loss, **fused_step},)


def followed(recipe: Mapping[str, Any], axis: Axis) -> Choice | None:
    """The choice that ``recipe`` makes; ``None`` where it makes none that there is."""
    for choice in axis.choices:
        said = [recipe[name] == value for name, value in choice.fields if name in recipe]
        if said and all(said):
            return choice
    return None
