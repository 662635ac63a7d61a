"""Spec: what every configuration of a training has, ours (``TrainSpec``) and a user's own command, ``ScriptSpec``."""

from __future__ import annotations

import json
import os
import re
import shlex
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from pathlib import Path, PurePath
from typing import Any, ClassVar, Literal, TypeVar, cast

from pytest_llmperf.settings.setting import SpecError, is_refusal
from pytest_llmperf.support.codec import plain_fields
from pytest_llmperf.support.files import hashed
from pytest_llmperf.support.redaction import is_secret
from pytest_llmperf.support.user_input import A_TOLERANCE, hint, is_tolerance

__tracebackhide__ = is_refusal  # a refusal is about the caller's line

_Spec = TypeVar("_Spec", bound="Spec")


class Spec(ABC):
    """One training configuration: frozen, validated when it is made."""

    gpus: int
    """World size: GPUs, or ranks on the CPU."""
    micro_batch_size: int
    steps: int
    min_steps: int
    warmup_steps: int
    throughput_tolerance: float | None
    memory_tolerance: float | None

    is_script: ClassVar[bool] = False
    """Whether a user's own command trains, of which nothing is known but what is seen."""

    _needs: ClassVar[tuple[str, str]]
    """The field that it cannot do without, and an example of its value."""
    _no_field: ClassVar[Mapping[str, str]] = {}
    """Words that are no field, and what they are."""

    def __new__(cls, *args: Any, **given: Any) -> Spec:  # noqa: PYI034 - typing has no Self before Python 3.11
        # Here, because dataclass' own __init__ answers an unknown field with a TypeError that knows no nearest one.
        needed, example = cls._needs
        known = [each.name for each in fields(cast("Any", cls))]
        if args:
            raise SpecError(f"{cls.__name__} takes its fields by name, e.g. {needed}={args[0]!r}")
        for name in given:
            if name not in known:
                raise SpecError(f"{cls.__name__} has no field {name!r}{cls._no_field.get(name) or hint(name, known)}")
        if needed not in given:
            raise SpecError(f"{cls.__name__} needs a {needed}, e.g. {needed}={example!r}")
        return super().__new__(cls)

    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, Any]]:
        needed = self._needs[0]
        return (), {needed: getattr(self, needed)}  # pickle and copy go through __new__ too, and set the others later

    @property
    def reads_gpu_numbers(self) -> bool:
        """Whether something in it takes the GPUs that it sees by number alone, and no UUID."""
        return self.is_script

    @property
    @abstractmethod
    def slug(self) -> str:
        """The model's name, or the script's: the folder of its baselines."""

    @property
    @abstractmethod
    def id(self) -> str:
        """For people and ``-k``."""

    @property
    @abstractmethod
    def digest(self) -> str:
        """Identity of the work: 16 hex digits, the same on every Python, machine and path."""

    @property
    def content(self) -> str:
        """The ``digest``, and that of files that the work is made of and that may change under it."""
        return self.digest

    @property
    @abstractmethod
    def capacity_id(self) -> str:
        """The ``id`` without the micro-batch size, of which the largest is sought."""

    @property
    def capacity_digest(self) -> str:
        """Identity of the search for the largest micro-batch, whatever size it begins at."""
        return hashed(f"capacity {self.changed(micro_batch_size=1).digest}")

    @property
    def passes_per_step(self) -> int:
        """Backward passes of one step, where that is known; else 1."""
        return 1

    def changed(self, **values: Any) -> Spec:
        """The same with other values of these fields."""
        return cast("Spec", replace(cast("Any", self), **values))

    def narrower(self) -> Iterator[Spec]:
        """Every spec that is the same work for each GPU on fewer of them, from one GPU on."""
        return iter(())

    def to_dict(self) -> dict[str, Any]:
        return plain_fields(self)


def within(spec: _Spec, root: Path) -> _Spec:
    """``spec`` with absolute paths inside of the project, if they are there, named from where it runs."""
    if not isinstance(spec, ScriptSpec):
        return spec
    root, here = root.resolve(), spec.folder(root)
    top = next((each for each in (root, *root.parents) if (each / ".git").exists()), root)

    def named(word: str, start: Path) -> str:
        option, equals, path = word.rpartition("=")
        absolute = Path(path).parent.resolve() / Path(path).name
        if not (path[:1] == "/" and os.path.exists(path) and absolute.is_relative_to(top)):  # noqa: PTH110 - of any length
            return word
        relative = os.path.relpath(absolute, start)
        return f"{option}{equals}{relative if relative.startswith('..') else f'./{relative}'}"

    changed: dict[str, Any] = {}
    for name in ("command", "tiny"):
        words = shlex.split(getattr(spec, name))
        ours = [words[0], *(named(word, here) for word in words[1:])] if words else []  # its program is no file of it
        changed |= {name: shlex.join(ours)} if ours != words else {}
    cwd = os.path.normpath(named(spec.cwd, root)) if spec.cwd[:1] == "/" else spec.cwd
    return replace(spec, cwd=cwd, **changed)


def is_narrower(narrow: Spec, wide: Spec) -> bool:
    """Whether ``narrow`` is the training of ``wide``, with the same work for each GPU, on fewer of them."""
    return narrow.gpus < wide.gpus and any(one.digest == narrow.digest for one in wide.narrower())


def read_spec(values: Mapping[str, Any]) -> Spec:
    """The spec with these fields, of whichever kind; SpecError: an unknown field, or an invalid value."""
    from pytest_llmperf.settings.train_spec import TrainSpec  # noqa: PLC0415 - it is a Spec

    if "command" not in values:
        return TrainSpec.from_dict(values)
    # Files of before have a field that is gone; all but a few its default.
    return ScriptSpec(**{name: value for name, value in values.items() if (name, value) != ("training", 1)})


# Where launchers say how many ranks they start on a machine.
_RANKS = re.compile(r"--(?:nproc[-_]per[-_]node|num[-_]processes|num[-_]gpus)")
# A word in two pairs of braces is one in braces.
_BLANK = re.compile(r"\{(\{\w*\})\}|\{(\w*)\}")
# They mean something between words that are not quoted.
_OF_A_SHELL = frozenset({"&&", "||", "|", ";", "&", ">", ">>", "<", "2>", "2>&1"})
_FILLED = ("gpus", "micro_batch_size")
_SEQUENCES = re.compile(r"sequences:([1-9]\d*)")
_LONGEST_ID, _LONGEST_NAME = 80, 120
# Words before a script that its id need not tell apart, beside the number of ranks: of one rank, and of several.
_USUAL_OF_ONE, _USUAL_OF_SEVERAL = (
    re.compile(r"python[\d.]*( -[um])*|"),
    re.compile(r"torchrun( --standalone| --nnodes=1| -m| --module)*"),
)
# Modules that start ranks: what follows their names is theirs, and what follows any other's is the script's.
_LAUNCHERS = ("torch", "accelerate", "deepspeed")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


_EXPECTED: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("steps", "warmup_steps", "micro_batch_size"), (_is_count, "a whole number of at least 1")),
    **dict.fromkeys(
        ("throughput_tolerance", "memory_tolerance"), (lambda value: value is None or is_tolerance(value), A_TOLERANCE)
    ),
    "tokens": (
        lambda value: value == "auto" or _is_count(value) or bool(_SEQUENCES.fullmatch(str(value))),
        "'auto', a number of tokens a step, or 'sequences:64'",
    ),
    "step": (
        lambda value: _is_count(value) or (isinstance(value, str) and bool(value)),
        "'auto', an optimizer's class, or a number of its calls",
    ),
    "gpus": (lambda value: value == 0 or _is_count(value), "a whole number of at least 1"),
    "seed": (lambda value: value is None or _is_count(value) or value == 0, "a whole number of at least 0"),
    "cwd": (lambda value: isinstance(value, str), "a folder's name"),
    "name": (lambda value: isinstance(value, str) and len(value) <= _LONGEST_NAME, f"at most {_LONGEST_NAME} letters"),
    "env": (lambda value: all(isinstance(each, str) for each in value.values()), "text of each variable"),
    "workdir": (lambda value: value in ("scratch", "own"), "scratch or own"),
    "end": (lambda value: value in ("park", "script"), "park or script"),
}

# Fields whose type is looked at before anything else: of some a tuple, or a dictionary, is made.
_MADE_OF: Mapping[str, tuple[type, str]] = {
    **dict.fromkeys(("command", "tiny"), (str, "one text, e.g. 'torchrun --nproc-per-node 2 train.py'")),
    "watch": (Iterable, "files' names"),
    "env": (Mapping, "names of variables and their text"),
}

#: Fields that say how it is launched and measured, or by what to judge: no part of the identity.
_HOW = ("steps", "warmup_steps", "throughput_tolerance", "memory_tolerance", "watch", "name", "tiny", "workdir", "end")

#: Fields of the identity that the words of a command do not show: an id ends with digits of the digest for them.
_IN_ID = frozenset({"cwd", "tokens", "step", "seed", "env"})


@dataclass(frozen=True, kw_only=True)
class ScriptSpec(Spec):
    """A command that trains, as a user runs it; ``SpecError``: a value that cannot work, in one line."""

    command: str
    """Run without a shell. ``{gpus}`` and ``{micro_batch_size}`` are filled in; ``{{word}}`` is one in braces."""
    gpus: int = 0
    """World size. Left out: what the command tells its launcher, else 1."""
    micro_batch_size: int = 1
    """For ``{micro_batch_size}`` in the command."""
    cwd: str = "."
    """The folder in which the command is written to run, beside the run's root."""
    name: str = ""
    """The id for people; left out, it is made of the command."""
    steps: int = 30
    """Optimizer steps of one launch, the first one included; a launch takes all of them."""
    warmup_steps: int = 4
    """Steps left out of the steady rate at least, the first one included."""
    tokens: str | int = "auto"
    """Tokens of one step over all ranks, or ``sequences:64``. ``auto``: counted where the model embeds them."""
    step: str | int = "auto"
    """The optimizer, by its class, whose calls end a step; a number: so many calls are one step."""
    seed: int | None = None
    """Seeds torch, random and numpy when they are imported; left out: what the script does."""
    watch: Sequence[str] = ()
    """More files whose content is evidence, beside those of the project that ranks import."""
    env: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Environment variables of the command."""
    workdir: Literal["scratch", "own"] = "scratch"
    """Where it runs: in a folder of the launch that shows the files of ``cwd``, or in ``cwd`` itself."""
    end: Literal["park", "script"] = "park"
    """After the measured steps: nothing of the script runs any more, or it goes on to its own end."""
    tiny: str = ""
    """The same training made small, for ``--perf-static``: a command that a CPU runs in seconds."""
    throughput_tolerance: float | None = None
    memory_tolerance: float | None = None

    is_script: ClassVar[bool] = True
    _needs = ("command", "torchrun --nproc-per-node 2 train.py")

    def __post_init__(self) -> None:
        for name, (kind, expected) in _MADE_OF.items():
            if not isinstance(getattr(self, name), kind):
                raise SpecError(f"ScriptSpec: {name}={getattr(self, name)!r}, expected {expected}")
        object.__setattr__(self, "watch", (self.watch,) if isinstance(self.watch, str) else tuple(self.watch))
        object.__setattr__(self, "env", dict(self.env))
        secrets = [f"env has a secret, {name}," for name, value in self.env.items() if is_secret(name, str(value))]
        secrets += [f"{name} has a secret," for name in ("command", "tiny") if is_secret("", str(getattr(self, name)))]
        shown = [f"{secret} which a baseline would show; leave it to the shell" for secret in secrets]
        for line in chain(shown, self._problems()):  # the first alone: later ones need what it asks for
            raise SpecError(f"ScriptSpec: {line}")
        if not self.gpus:
            object.__setattr__(self, "gpus", told_ranks(self) or 1)

    def _problems(self) -> Iterator[str]:
        for name in ("command", "tiny"):
            command = getattr(self, name)
            try:
                words = shlex.split(command)
            except ValueError as error:
                yield f"{name}={command!r} cannot be split into words ({error})"
                return
            if shell := [word for word in words if word in _OF_A_SHELL or re.match(r"[A-Za-z_]\w*=", words[0])]:
                yield f"{name} has {shell[0]!r}, and no shell reads it; say cwd= or env=, or bash -c 'one && two'"
            if not words and name == "command":
                yield "command is empty, expected e.g. 'torchrun --nproc-per-node 2 train.py'"
            for blank in sorted(blanks(command).difference(_FILLED)):
                expected = f"expected {{gpus}} or {{micro_batch_size}}{hint(blank, _FILLED)}"
                yield f"{name} has {{{blank}}}, {expected}; braces of its own are {{{{{blank}}}}}"
        if self.gpus and (told := told_ranks(self)) and told != self.gpus:
            yield f"gpus={self.gpus}, and its command starts {told} ranks; leave gpus out, or write {{gpus}} there"
        for name, (holds, expected) in _EXPECTED.items():
            if not holds(getattr(self, name)):
                yield f"{name}={getattr(self, name)!r}, expected {expected}"
        if self.steps < self.warmup_steps + 2:
            yield f"steps={self.steps}, expected at least 2 more than warmup_steps={self.warmup_steps}"

    @property
    def argv(self) -> list[str]:
        """The words of the command, filled in."""
        filled = {"gpus": str(self.gpus), "micro_batch_size": str(self.micro_batch_size)}
        return [_BLANK.sub(lambda found: found[1] or filled[found[2]], word) for word in shlex.split(self.command)]

    @property
    def min_steps(self) -> int:  # type: ignore[override]
        """All: ranks end at the same step by counting, and do not talk to one another."""
        return self.steps

    @property
    def rate_unit(self) -> str:
        """Of what the rate is, where ``tokens`` says so."""
        return "sequences" if _SEQUENCES.fullmatch(str(self.tokens)) else "tokens"

    @property
    def given_tokens(self) -> int | None:
        """Tokens, or sequences, of one step over all ranks; ``None``: they are counted."""
        found = _SEQUENCES.fullmatch(str(self.tokens))
        return int(found[1]) if found else self.tokens if isinstance(self.tokens, int) else None

    @property
    def script(self) -> int:
        """Where the script is among ``argv``."""
        argv = self.argv
        files = [at for at, word in enumerate(argv) if word.endswith(".py")]
        modules = [at + 1 for at, word in enumerate(argv[:-1]) if word in ("-m", "--module")]
        return (files or modules[-1:] or [0])[0]

    @property
    def slug(self) -> str:
        word = self.argv[self.script]
        return _slug(PurePath(word).stem if word.endswith(".py") else PurePath(word).name)

    @property
    def id(self) -> str:
        if self.name:
            return f"{_slug(self.name)}-gpus{self.gpus}"
        return self._id(self.argv[self.script + 1 :], self.digest)

    def _id(self, words: Sequence[str], digest: str) -> str:
        made = _slug("-".join([self.slug, *words]))
        # Words before the script may say more than is usual for so many ranks, and how many there are.
        before = " ".join(PurePath(word).name for word in self.argv[: self.script])
        usual = _USUAL_OF_ONE if self.gpus == 1 else _USUAL_OF_SEVERAL
        starts_usually = usual.fullmatch(" ".join(re.sub(rf"{_RANKS.pattern}[= ]\S+", "", before).split()))
        if len(made) > _LONGEST_ID or _IN_ID & self._unusual_work().keys() or not starts_usually:
            made = f"{made[:_LONGEST_ID]}-{digest[:6]}"
        return f"{made}-gpus{self.gpus}"

    @property
    def digest(self) -> str:
        """Of the words of the command and of what says what work is; the content of files is evidence and no identity.
        A field that came later stays out while it has its default."""
        work = {"argv": self.argv, **self._unusual_work(), "gpus": self.gpus}
        return hashed(json.dumps(work, sort_keys=True, separators=(",", ":")))

    def _unusual_work(self) -> dict[str, Any]:
        """What says what work is, beside the command and the GPUs, and is not at its default."""
        told = {*_HOW, "command", "micro_batch_size", "gpus"}
        values = ((each, getattr(self, each.name)) for each in fields(self) if each.name not in told)
        return {each.name: value for each, value in values if value != ({} if each.name == "env" else each.default)}

    @property
    def capacity_id(self) -> str:
        words = [word.replace("{micro_batch_size}", "max") for word in shlex.split(self.command)[self.script + 1 :]]
        return f"{_slug(self.name)}-max-gpus{self.gpus}" if self.name else self._id(words, self.capacity_digest)

    def narrower(self) -> Iterator[Spec]:
        """Those of fewer GPUs, where the command says ``{gpus}``."""
        widths = range(1, self.gpus) if "gpus" in blanks(self.command) else ()
        return (replace(self, gpus=gpus) for gpus in widths)

    def folder(self, root: Path) -> Path:
        """Where the command is written to run."""
        return (root / self.cwd).resolve()


def told_ranks(spec: ScriptSpec) -> int | None:
    """What its command tells its launcher; ``None``: nothing, or a word for all GPUs."""
    words, at = shlex.split(spec.command), spec.script
    if words[at].endswith(".py") or (at and words[at].partition(".")[0] not in _LAUNCHERS):
        words = words[:at]
    for word, following in zip(words, [*words[1:], ""], strict=False):
        option, equals, value = word.partition("=")
        if _RANKS.fullmatch(option):
            told = value if equals else following
            return int(told) if told.isdecimal() else None
    return None


def blanks(command: str) -> set[str]:
    """Those of ``command`` that are filled in."""
    return {word for own, word in _BLANK.findall(command) if not own}


def filled(command: str, words: Mapping[str, object]) -> str:
    """``command`` with these ``words`` in the place of blanks; others are left."""
    texts = {name: str(word).lower() if isinstance(word, bool) else str(word) for name, word in words.items()}
    return _BLANK.sub(lambda found: texts.get(found[2], found[0]), command)


def literal(command: str) -> str:
    """``command`` with no blank in it."""
    return _BLANK.sub(lambda found: f"{{{found[0]}}}", command)


def _slug(words: str) -> str:
    return re.sub(r"[^\w.]+", "-", words).strip("-.").lower() or "script"
