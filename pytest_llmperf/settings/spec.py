"""Spec: what every configuration of a training has, ours (``TrainSpec``) and a user's own command (``ScriptSpec``)."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from typing import Any, ClassVar, cast

from pytest_llmperf.settings.setting import SpecError, is_refusal
from pytest_llmperf.support.codec import plain_fields
from pytest_llmperf.support.user_input import hint

__tracebackhide__ = is_refusal  # a refusal is about the caller's line


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


def is_narrower(narrow: Spec, wide: Spec) -> bool:
    """Whether ``narrow`` is the training of ``wide``, with the same work for each GPU, on fewer of them."""
    return narrow.gpus < wide.gpus and any(one.digest == narrow.digest for one in wide.narrower())


def hashed(text: str) -> str:
    """The 16 hex digits of a digest."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_spec(values: Mapping[str, Any]) -> Spec:
    """The spec with these fields, of whichever kind; SpecError: an unknown field, or an invalid value."""
    # Imported here: each of them is a Spec.
    from pytest_llmperf.settings.script_spec import ScriptSpec  # noqa: PLC0415
    from pytest_llmperf.settings.train_spec import TrainSpec  # noqa: PLC0415

    return ScriptSpec(**values) if "command" in values else TrainSpec(**values)
