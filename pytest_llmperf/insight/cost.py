"""What a training costs in time, GPU-hours, money and energy, and which option serves a purpose. Pure.

Linear billing: so much for each GPU-hour, whatever the number of GPUs. Prices are in any one currency.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

_HOUR = 3600
_MILLION = 1e6
_JOULES_PER_KWH = 3.6e6

#: Closer than this, as a fraction, two options are a tie: launches on one host differ by as much.
TIE = 0.01


@dataclass(frozen=True)
class Price:
    """Of a GPU-hour."""

    gpu_hour: float
    currency: str


def tokens_per_price(rate: float, price: float) -> float:
    """Tokens for one unit of money, at ``rate`` tokens/s per GPU and ``price`` of a GPU-hour."""
    return rate * _HOUR / price


def price_per_million(rate: float, price: float) -> float:
    """What a million tokens cost."""
    return _MILLION / tokens_per_price(rate, price)


def cost_efficiency(rate: float, rate_of_one: float) -> float:
    """The chapter's normalised proxy for tokens/s per euro (table 15.12): throughput per GPU against one GPU's."""
    return rate / rate_of_one


def joules_per_token(power_watts: float, tokens_per_second: float) -> float:
    """Of all GPUs together: their power over their rate."""
    return power_watts / tokens_per_second


@dataclass(frozen=True)
class Option:
    """One way to train: a case as it was measured."""

    name: str
    gpus: int
    rate: float
    """Tokens/s per GPU."""
    rate_of_one: float | None = None
    """The same of this training on one GPU, where it is known."""
    power_watts: float | None = None
    """Mean, of all its GPUs together; ``None`` where it is not known."""
    training: str = ""
    """What is learnt, in words; options of other words are no choice for whoever wants these."""

    @property
    def tokens_per_second(self) -> float:
        return self.rate * self.gpus

    def hours(self, tokens: float) -> float:
        """Of wall time, without start-up."""
        return tokens / self.tokens_per_second / _HOUR

    def gpu_hours(self, tokens: float) -> float:
        return self.hours(tokens) * self.gpus

    @property
    def joules_per_token(self) -> float | None:
        return None if self.power_watts is None else joules_per_token(self.power_watts, self.tokens_per_second)

    def kilowatt_hours(self, tokens: float) -> float | None:
        """Of the GPUs alone."""
        joules = self.joules_per_token
        return None if joules is None else joules * tokens / _JOULES_PER_KWH


@dataclass(frozen=True, kw_only=True)
class Aim:
    """What a training is for."""

    purpose: str
    """One of ``PURPOSES``."""
    tokens: float
    price: float | None = None
    """Of a GPU-hour; ``None``: costs are told in GPU-hours."""
    deadline_hours: float | None = None
    budget: float | None = None
    """In the price's currency, or in GPU-hours where there is none."""

    def cost(self, option: Option) -> float:
        """Money, or GPU-hours where there is no price."""
        return option.gpu_hours(self.tokens) * (1.0 if self.price is None else self.price)

    def too_late(self, option: Option) -> bool:
        return self.deadline_hours is not None and option.hours(self.tokens) > self.deadline_hours

    def too_dear(self, option: Option) -> bool:
        return self.budget is not None and self.cost(option) > self.budget


#: What each wants least of: wall time or cost. A deadline and a budget are kept whatever the purpose.
PURPOSES: Mapping[str, str] = {"fastest": "time", "cheapest": "cost", "deadline": "cost", "budget": "time"}


@dataclass(frozen=True)
class Choice:
    """The option that serves an aim best; ``None`` where none serves it."""

    best: Option | None
    ties: tuple[Option, ...] = ()
    """Others that serve it as well, within ``TIE``; the best of them is first in what comes second, time or cost."""


def choose_each(options: Sequence[Option], aim: Aim) -> dict[str, Choice]:
    """The choice among the options of each training: what serves best first, what nothing serves last."""
    trainings = sorted({option.training for option in options})
    found = {name: choose([option for option in options if option.training == name], aim) for name in trainings}
    first = aim.cost if PURPOSES[aim.purpose] == "cost" else lambda option: option.hours(aim.tokens)
    return dict(sorted(found.items(), key=lambda one: math.inf if one[1].best is None else first(one[1].best)))


def choose(options: Sequence[Option], aim: Aim) -> Choice:
    """Of the ``options`` that keep the aim's deadline and budget the fastest, or the cheapest."""
    serving = [option for option in options if not aim.too_late(option) and not aim.too_dear(option)]
    if not serving:
        return Choice(None)
    measures: Mapping[str, Callable[[Option], float]] = {
        "time": lambda option: option.hours(aim.tokens),
        "cost": aim.cost,
    }
    first = measures[PURPOSES[aim.purpose]]
    second = measures["cost" if PURPOSES[aim.purpose] == "time" else "time"]
    least = min(map(first, serving))
    equals = sorted((option for option in serving if first(option) <= least * (1 + TIE)), key=second)
    return Choice(equals[0], tuple(equals[1:]))
