"""Which calls of optimizers end a step of a training that nobody wrote for us. Pure.

Optimizers whose lives do not overlap are trainings one after the other. In a training the anchor is the least frequent
optimizer that is neither rare nor there for a part only; of several that are as frequent, the one that first steps
last, since an outer optimizer calls its inner ones. Calls of it with no backward pass between them are one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

# Calls of the most frequent optimizer after which a training is known, and at the latest; who is called less than once
# in so many of them is rare.
_KNOWN, _LATEST, _RARE = 8, 24, 8


@dataclass
class Life:
    """One optimizer's calls; several without a backward pass between them are one."""

    name: str
    calls: list[int] = field(default_factory=list)
    """Where they are among the calls of all, those of several by their last."""
    count: int = 0
    passes: int = -1
    """Backward passes that had begun by its last call."""
    repeats: int = 0
    """Calls since that pass."""
    usual_repeats: int = 1
    """Calls after the pass before that one."""

    def called(self, number: int, passes: int) -> None:
        if self.count and passes == self.passes and passes:
            self.repeats += 1
            self.calls[-1] = number
            return
        self.usual_repeats = self.repeats or 1
        self.passes, self.repeats = passes, 1
        self.count += 1
        self.calls.append(number)


class Steps:
    """Hears of every call, and says which of them end a step of the training that is meant."""

    def __init__(self, step: str | int = "auto", training: int = 1) -> None:
        """``step``: the class of the optimizer that is the anchor, or how many calls of it are one step."""
        self._class = step if isinstance(step, str) and step != "auto" else ""
        self._calls_per_step = step if isinstance(step, int) else 1
        self._training, self.phase = training, 1
        self._lives: dict[int, Life] = {}
        self.num_calls = 0
        """Of all optimizers."""
        self.anchor: int | None = None
        """The optimizer whose calls end steps, once that is known."""
        self._repeats = 1
        self._foreign: dict[int, int] = {}
        self.is_over = False
        """The training that is meant has ended by itself."""

    def call(self, optimizer: int, name: str, passes: int) -> list[int]:
        """A call of ``optimizer``, of the class ``name``, has ended, after so many backward passes had begun.

        Returns the calls, by their numbers from 0, of which it is known only now that a step ended with them.
        """
        number = self.num_calls
        self.num_calls += 1
        life = self._lives.setdefault(optimizer, Life(name))
        life.called(number, passes)
        if self.anchor is None:
            return self._decided() if self._is_known(optimizer) else []
        if optimizer != self.anchor:
            self._hears_of(optimizer)
            return []
        self._foreign.clear()
        is_whole = life.repeats == self._repeats and life.count % self._calls_per_step == 0
        return [number] if is_whole and self.phase == self._training else []

    @property
    def notes(self) -> list[str]:
        """What a reader should know of how steps were counted."""
        if self.anchor is None:
            return []
        own = self._lives[self.anchor]
        others = [life for key, life in self._lives.items() if key != self.anchor and life.count != own.count]
        if not others:
            return []
        told = "; ".join(f"{life.name} stepped {life.count} times" for life in others[:3])
        return [f"steps are counted by {own.name} ({own.count}); {told} meanwhile: say step= if that is the step"]

    def _is_known(self, optimizer: int) -> bool:
        """Whether the calls so far tell the anchor."""
        most = max(life.count for life in self._lives.values())
        if self._lives[optimizer].count < most or most < _KNOWN:
            return False
        if most >= _LATEST:
            return True
        return all(len(life.calls) > 1 or self._passed(life.calls[-1]) > _RARE for life in self._lives.values())

    def _passed(self, call: int) -> int:
        """Calls of the most frequent optimizer since ``call``."""
        most = max(self._lives.values(), key=lambda life: life.count)
        return sum(each > call for each in most.calls)

    def _decided(self) -> list[int]:
        phases = trainings(list(self._lives.values()))
        if len(phases) > 1 and self.phase < self._training:
            self.phase += len(phases) - 1
            self._lives = {key: life for key, life in self._lives.items() if life in phases[-1]}
            return []
        lives = phases[0]
        if self._class:
            lives = [life for life in self._lives.values() if life.name == self._class] or lives
        chosen = anchor(lives)
        self.anchor = next(key for key, life in self._lives.items() if life is chosen)
        self.is_over, self._repeats = len(phases) > 1, chosen.usual_repeats
        is_whole = chosen.repeats == self._repeats
        whole = chosen.calls if is_whole else chosen.calls[:-1]
        return whole[self._calls_per_step - 1 :: self._calls_per_step] if self.phase == self._training else []

    def _hears_of(self, optimizer: int) -> None:
        """Others than the anchor step; where it does not any more, its training is over."""
        self._foreign[optimizer] = self._foreign.get(optimizer, 0) + 1
        assert self.anchor is not None  # noqa: S101 - it is known here
        last = self._lives[self.anchor].calls[-1]
        new = self._lives[optimizer].calls[0] > last
        if not new or self._foreign[optimizer] < _KNOWN:
            return
        if self.phase == self._training:
            self.is_over = True
            return
        self.phase += 1
        self.anchor = None
        self._lives = {key: life for key, life in self._lives.items() if life.calls[0] > last}
        self._foreign.clear()


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
        found[1] = found.pop(0) + found[0]
    return found


def anchor(lives: Sequence[Life]) -> Life:
    """The optimizer of one training whose calls end its steps."""
    most = max(lives, key=lambda life: life.count)
    usual = [life for life in lives if not _is_rare(life, most) and not _is_partial(life, most)]
    return min(usual or [most], key=lambda life: (life.count, -life.calls[0]))


def _is_rare(life: Life, most: Life) -> bool:
    """Whether fewer than one in so many calls of the ``most`` frequent one goes with one of its own."""
    if life.count < 2:  # noqa: PLR2004 - two make a distance
        return sum(each > life.calls[-1] for each in most.calls) > _RARE
    between = sum(life.calls[0] < each <= life.calls[-1] for each in most.calls)
    return between > _RARE * (life.count - 1)


def _is_partial(life: Life, most: Life) -> bool:
    """Whether it begins or ends while the ``most`` frequent one goes on."""
    distance = max(1.0, most.count / life.count)
    before = sum(each < life.calls[0] for each in most.calls)
    after = sum(each > life.calls[-1] for each in most.calls)
    return max(before, after) > 2 * distance + 1
