"""Which calls of optimizers end a step of a training that nobody wrote for us. Pure.

Optimizers whose lives do not overlap are trainings one after the other. In a training the anchor is the least frequent
optimizer that is neither rare nor there for a part only; of several that are as frequent, the one that first steps
last, since an outer optimizer calls its inner ones. Calls of it with no backward pass between them are one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

# Calls of the most frequent optimizer after which a training is known, at the latest; one called less often is rare.
_KNOWN, _LATEST, _RARE = 8, 24, 8


class StepsError(Exception):
    """The steps that are meant did not come; says why."""


@dataclass
class Life:
    """One optimizer's calls; several without a backward pass between them are one."""

    name: str
    calls: list[int] = field(default_factory=list)
    """Where they are among the calls of all, those of several by their last; the first and the last at least."""
    count: int = 0
    passes: int = -1
    """Backward passes that had begun by its last call."""
    repeats: int = 0
    """Calls since that pass."""
    usual_repeats: int = 1
    """Calls after the pass before that one."""

    def called(self, number: int, passes: int, *, is_listed: bool) -> None:
        if passes and not self.passes and is_listed:  # what came before the first pass of all only made its state
            self.count, self.calls = 0, []
        if is_again := bool(self.count and passes == self.passes and passes):
            self.repeats += 1
        else:
            self.usual_repeats, self.repeats = self.repeats or 1, 1
            self.passes, self.count = passes, self.count + 1
        if is_again or not (is_listed or len(self.calls) < 2):  # noqa: PLR2004 - the first and the last
            self.calls.pop()
        self.calls.append(number)


class Steps:
    """Hears of every call, and says which of them end a step of the training that is meant."""

    def __init__(self, step: str | int = "auto") -> None:
        """``step``: the class of the optimizer that is the anchor, or how many calls of it are one step."""
        self._class = step if isinstance(step, str) and step != "auto" else ""
        self._calls_per_step = step if isinstance(step, int) else 1
        self._lives: dict[int, Life] = {}
        self._anchor: int | None = None  # whose calls end steps, once that is known
        self._repeats = 1
        self._most = 0  # calls of the most frequent optimizer
        self._foreign: dict[int, int] = {}  # calls of others since the anchor's last
        self._aside: dict[int, Life] = {}  # those that end no step, once that is settled
        self.num_calls = 0
        """Of all optimizers."""
        self.is_over = False
        """The first training has ended by itself, and another one begun."""

    @property
    def is_settled(self) -> bool:
        """Whether a step that ends is known at once."""
        return self._anchor is not None

    def is_aside(self, optimizer: int | None, passes: int) -> bool:
        """Whether it is known that a call of ``optimizer`` ends no step; it is counted, and ``call`` not asked."""
        life = self._aside.get(optimizer) if optimizer else None
        if life is None:
            return False
        if life.passes != passes or not passes:
            life.passes = passes
            life.count += 1
        return True

    def call(self, optimizer: int, name: str, passes: int) -> list[int]:
        """A call of ``optimizer``, of the class ``name``, has ended, after so many backward passes had begun. Returns
        the calls, by their numbers from 0, of which it is known only now that a step ended with them. StepsError: no
        optimizer of the class that is asked for is among those that step."""
        number = self.num_calls
        self.num_calls += 1
        life = self._lives.setdefault(optimizer, Life(name))
        life.called(number, passes, is_listed=not self.is_settled)
        self._most = max(self._most, life.count)
        if self._anchor is None:
            return self._decided() if self._is_known(life) else []
        if optimizer != self._anchor:  # its training is over where it steps no more, and others do that came later
            if life.calls[0] > self._lives[self._anchor].calls[-1]:
                self._foreign[optimizer] = self._foreign.get(optimizer, 0) + 1
                self.is_over = self.is_over or self._foreign[optimizer] >= _KNOWN
            return []
        self._foreign.clear()
        return [number] if life.repeats == self._repeats and life.count % self._calls_per_step == 0 else []

    @property
    def notes(self) -> list[str]:
        """What a reader should know of how steps were counted."""
        if self._anchor is None:
            return []
        own = self._lives[self._anchor]
        others = [life for life in self._lives.values() if life.count != own.count]
        named = ", ".join(f"{life.name} ({life.count})" for life in others[:3])
        is_choice = not self.is_over and any(life.name != own.name for life in others)  # of the first training alone
        hint = ": say step= if that is the step" if is_choice else ""
        return [f"steps are counted by calls of {own.name} ({own.count}), not of {named}{hint}"] if others else []

    @property
    def num_steps(self) -> int:
        """As far as anybody knows."""
        return self._most if self._anchor is None else self._lives[self._anchor].count

    def _is_known(self, life: Life) -> bool:
        """Whether the calls so far tell the anchor; ``life`` has the last one."""
        go_on = (len(each.calls) > 1 or _since(each, life) > _RARE for each in self._lives.values())
        return life.count >= self._most >= _KNOWN and (self._most >= _LATEST or all(go_on))

    def _decided(self) -> list[int]:
        phases = trainings(list(self._lives.values()))
        if not (lives := [life for life in phases[0] if not self._class or life.name == self._class]):
            if self._most < _LATEST:
                return []
            seen = ", ".join(sorted({life.name for life in phases[0]}))
            raise StepsError(f"step={self._class!r}, and no optimizer of that class steps; expected one of {seen}")
        chosen = anchor(lives)
        self._anchor = next(key for key, life in self._lives.items() if life is chosen)
        self.is_over, self._repeats = len(phases) > 1, chosen.usual_repeats
        self._aside = {key: life for key, life in self._lives.items() if life is not chosen}
        whole = chosen.calls if chosen.repeats == self._repeats else chosen.calls[:-1]
        return whole[self._calls_per_step - 1 :: self._calls_per_step]


def trainings(lives: Sequence[Life]) -> list[list[Life]]:
    """``lives`` by training: those that overlap belong together."""
    found: list[list[Life]] = []
    end = -1
    for life in sorted(lives, key=lambda each: each.calls[0]):
        if life.calls[0] > end:
            found.append([])
        found[-1].append(life)
        end = max(end, life.calls[-1])
    # A loop of several optimizers overlaps from the second step on; what has stepped once may still go on.
    while len(found) > 1 and all(life.count == 1 for life in found[0]):
        found[:2] = [found[0] + found[1]]
    return found


def anchor(lives: Sequence[Life]) -> Life:
    """The optimizer of one training whose calls end its steps."""
    most = max(lives, key=lambda life: life.count)
    usual = [life for life in lives if not _is_rare(life, most) and not _is_partial(life, most)]
    return min(usual or [most], key=lambda life: (life.count, -life.calls[0]))


def _is_rare(life: Life, most: Life) -> bool:
    """Whether fewer than one in so many calls of the ``most`` frequent one goes with one of its own."""
    if life.count < 2:  # noqa: PLR2004 - two make a distance
        return _since(life, most) > _RARE
    between = sum(life.calls[0] < each <= life.calls[-1] for each in most.calls)
    return between > _RARE * (life.count - 1)


def _is_partial(life: Life, most: Life) -> bool:
    """Whether it begins or ends while the ``most`` frequent one goes on."""
    distance = max(1.0, most.count / life.count)
    before = sum(each < life.calls[0] for each in most.calls)
    return max(before, _since(life, most)) > 2 * distance + 1


def _since(life: Life, most: Life) -> int:
    """Calls of the ``most`` frequent one since its last."""
    return sum(each > life.calls[-1] for each in most.calls)
