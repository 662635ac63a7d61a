"""What `llmperf report --purpose` answers, as pages: what serves each training, and what each option costs. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pytest_llmperf.cli.screen import Screen, table
from pytest_llmperf.insight import cost
from pytest_llmperf.insight.cost import Aim, Choice, Option
from pytest_llmperf.report.exports import comma_separated, escaped, markdown
from pytest_llmperf.report.table import Column
from pytest_llmperf.support import formats

_NOTES = (
    "every GPU-hour at one price; hours without queue and start-up, at the median steady step",
    "cost efficiency: tokens/s per euro against one GPU of the same training, the chapter's normalised proxy",
    "the batch of a step is not kept the same: it grows with the micro-batch and the GPUs",
)

_TRAININGS = (
    "another precision, optimizer or length may learn otherwise: each has its own answer; --like CASE asks for one"
)


@dataclass(frozen=True)
class Answer:
    """For one model: its options, and the choice among those of each training."""

    subject: str
    options: Sequence[Option]
    aim: Aim
    choices: Mapping[str, Choice]
    """By training, the one that serves best first."""
    currency: str

    @property
    def serves(self) -> bool:
        """Whether anything does."""
        return any(choice.best for choice in self.choices.values())

    @property
    def unit(self) -> str:
        """Of a cost."""
        return self.currency if self.aim.price is not None else "GPU-hours"


def text_page(found: Sequence[Answer], screen: Screen) -> list[str]:
    """For a terminal: the answer of each model, and the table it is from."""
    lines: list[str] = []
    for answer in found:
        lines += [*([""] if lines else []), heading(answer), *verdict(answer), *table(_columns(answer), screen)]
    return [*lines, "", *_NOTES]


def markdown_page(found: Sequence[Answer]) -> list[str]:
    """For a document."""
    lines: list[str] = []
    for answer in found:
        lines += [*([""] if lines else []), f"## {escaped(heading(answer))}", ""]
        lines += [*(f"- {escaped(line)}" for line in verdict(answer)), "", *markdown(_columns(answer))]
    return [*lines, "", *(f"- {line}" for line in _NOTES)]


def heading(answer: Answer) -> str:
    """What is asked."""
    aim = answer.aim
    words = [f"{aim.purpose}: {formats.compact(aim.tokens)} tokens", answer.subject]
    if aim.price is not None:
        words.append(f"{aim.price:.2f} {answer.currency} a GPU-hour")
    if aim.deadline_hours is not None:
        words.append(f"within {_hours(aim.deadline_hours)}")
    if aim.budget is not None:
        words.append(f"for at most {_cost(aim.budget, answer)}")
    return ", ".join(words)


def verdict(answer: Answer) -> list[str]:
    """Which option, or why none; of several trainings each."""
    if len(answer.choices) == 1:
        return [line for choice in answer.choices.values() for line in _chosen(answer, choice, answer.options)]
    lines = []
    for training, choice in answer.choices.items():
        options = [option for option in answer.options if option.training == training]
        lines += [f"{training}: {line}" for line in _chosen(answer, choice, options)]
    return [*lines, _TRAININGS]


def _chosen(answer: Answer, choice: Choice, options: Sequence[Option]) -> list[str]:
    best, aim = choice.best, answer.aim
    if best is None:
        return [_impossible(answer, options)]
    hours, price = _hours(best.hours(aim.tokens)), _cost(aim.cost(best), answer)
    lines = [f"{_name(best)}: {hours}, {price}"]
    if choice.ties:
        others = ", ".join(map(_name, choice.ties))
        less = "cost" if cost.PURPOSES[aim.purpose] == "time" else "time"
        lines.append(f"a tie within {cost.TIE * 100:g} %, decided by {less}: {others}")
    return lines


def _impossible(answer: Answer, options: Sequence[Option]) -> str:
    aim = answer.aim
    fastest = min(options, key=lambda option: option.hours(aim.tokens))
    cheapest = min(options, key=aim.cost)
    if all(map(aim.too_late, options)):
        shown = _hours(fastest.hours(aim.tokens))
        return f"impossible: the fastest, {_name(fastest)}, takes {shown}; allow that, or predict more GPUs"
    if all(map(aim.too_dear, options)):
        return f"impossible: the cheapest, {_name(cheapest)}, costs {_cost(aim.cost(cheapest), answer)}"
    in_time = min((option for option in options if not aim.too_late(option)), key=aim.cost)
    affordable = min((one for one in options if not aim.too_dear(one)), key=lambda one: one.hours(aim.tokens))
    return (
        f"impossible: in time the cheapest is {_name(in_time)} for {_cost(aim.cost(in_time), answer)}; "
        f"for the budget the fastest is {_name(affordable)} in {_hours(affordable.hours(aim.tokens))}"
    )


def _name(option: Option) -> str:
    gpus = "1 GPU" if option.gpus == 1 else f"{option.gpus} GPUs"
    return f"{option.name} ({gpus})"


def _hours(hours: float) -> str:
    return f"{hours:,.1f} h" if hours >= 1 else f"{hours * 60:.1f} min"


def _cost(value: float, answer: Answer) -> str:
    return f"{value:,.2f} {answer.unit}"


def _columns(answer: Answer) -> list[Column]:
    aim, options = answer.aim, answer.options
    price = aim.price

    def each(heading: str, shown: Callable[[Option], str], right: bool = True) -> Column:
        return Column(heading, [shown(option) for option in options], right=right)

    columns = [
        each("case", lambda one: one.name, right=False),
        *([each("trains", lambda one: one.training, right=False)] if len(answer.choices) > 1 else []),
        each("GPUs", lambda one: f"{one.gpus}"),
        each("tokens/s", lambda one: formats.tokens_per_second(one.tokens_per_second)),
        each("time", lambda one: _hours(one.hours(aim.tokens))),
        each("GPU-hours", lambda one: f"{one.gpu_hours(aim.tokens):,.1f}"),
    ]
    if price is not None:
        columns += [
            each(answer.currency, lambda one: f"{aim.cost(one):,.2f}"),
            each(f"{answer.currency}/M tokens", lambda one: f"{cost.price_per_million(one.rate, price):.4f}"),
            each(f"tokens/{answer.currency}", lambda one: formats.compact(cost.tokens_per_price(one.rate, price))),
        ]
    columns.append(each("cost efficiency", lambda one: _times(_efficiency(one))))
    if any(one.power_watts is not None for one in options):
        columns += [
            each("mJ/token", lambda one: _shown(one.joules_per_token, 1e3)),
            each("kWh", lambda one: _shown(one.kilowatt_hours(aim.tokens))),
        ]
    return [*columns, each("choice", lambda one: _standing(one, answer), right=False)]


def _efficiency(option: Option) -> float | None:
    return None if option.rate_of_one is None else cost.cost_efficiency(option.rate, option.rate_of_one)


def _times(value: float | None) -> str:
    return formats.ABSENT if value is None else f"{value:.2f}"


def _shown(value: float | None, factor: float = 1.0) -> str:
    return formats.ABSENT if value is None else f"{value * factor:,.3g}"


def _standing(option: Option, answer: Answer) -> str:
    choice = answer.choices[option.training]
    if option == choice.best:
        return "best"
    if option in choice.ties:
        return "tie"
    words = {"too late": answer.aim.too_late(option), "too dear": answer.aim.too_dear(option)}
    return ", ".join(word for word, holds in words.items() if holds) or formats.ABSENT


def csv_page(found: Sequence[Answer]) -> list[str]:
    """For programs: every option of every model on a line."""
    return comma_separated([_record(option, answer) for answer in found for option in answer.options])


def _record(option: Option, answer: Answer) -> dict[str, object]:
    aim = answer.aim
    return {
        "purpose": aim.purpose,
        "id": option.name,
        "training": option.training,
        "gpus": option.gpus,
        "tokens_per_second_per_gpu": option.rate,
        "tokens_per_second": option.tokens_per_second,
        "hours": option.hours(aim.tokens),
        "gpu_hours": option.gpu_hours(aim.tokens),
        "cost": None if aim.price is None else aim.cost(option),
        "currency": None if aim.price is None else answer.currency,
        "cost_per_million_tokens": None if aim.price is None else cost.price_per_million(option.rate, aim.price),
        "tokens_per_currency": None if aim.price is None else cost.tokens_per_price(option.rate, aim.price),
        "cost_efficiency": _efficiency(option),
        "joules_per_token": option.joules_per_token,
        "kilowatt_hours": option.kilowatt_hours(aim.tokens),
        "choice": _standing(option, answer),
    }
