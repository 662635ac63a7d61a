"""``llmperf report --purpose``: which case and how many GPUs serve a purpose, and what each would cost. Pure."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from pytest_llmperf.cli.pages import Screen, plain, table
from pytest_llmperf.cli.quantities import amount, duration, points, tokens
from pytest_llmperf.cli.series import Series, all_series, power_watts
from pytest_llmperf.cli.shelf import CaseError, Shelf
from pytest_llmperf.insight import cost
from pytest_llmperf.insight.cost import Aim, Choice, Option, choose
from pytest_llmperf.report import formats
from pytest_llmperf.report.table import Column
from pytest_llmperf.report.tables import comma_separated, escaped, markdown

_NOTES = (
    "every GPU-hour at one price; hours without queue and start-up, at the median steady step",
    "cost efficiency: tokens/s per euro against one GPU of the same training, the chapter's normalised proxy",
)


@dataclass(frozen=True)
class Answer:
    """For one model: its options, and the choice among them."""

    subject: str
    options: Sequence[Option]
    aim: Aim
    choice: Choice
    currency: str

    @property
    def unit(self) -> str:
        """Of a cost."""
        return self.currency if self.aim.price is not None else "GPU-hours"


def add_options(report: argparse.ArgumentParser) -> None:
    """What `--purpose` goes by."""
    group = report.add_argument_group("--purpose")
    group.add_argument("--tokens", metavar="T", type=tokens, help="to train on, e.g. 10B")
    group.add_argument("--price", metavar="P", type=amount, help="of a GPU-hour; left out: costs are GPU-hours")
    group.add_argument("--currency", metavar="NAME", default="EUR", help="of the price, default: %(default)s")
    group.add_argument("--deadline", metavar="TIME", type=duration, help="e.g. 24h, 2d or 90m")
    group.add_argument("--budget", metavar="N", type=amount, help="in the currency, or in GPU-hours without a price")
    group.add_argument("--points", metavar="N:RATE,…", type=points, help="GPUs and tokens/s per GPU, not baselines")
    group.add_argument("--model", metavar="NAME", help="only this model's baselines")


def misplaced(arguments: argparse.Namespace) -> str | None:
    """The option that says nothing to what is asked."""
    options = (
        ("samples", "steps", "hours") if arguments.purpose else ("tokens", "price", "deadline", "budget", "points")
    )
    return next((f"--{name}" for name in options if getattr(arguments, name) is not None), None)


def aim_of(arguments: argparse.Namespace) -> Aim:
    """What ``arguments`` ask for.

    Raises:
        CaseError: the purpose needs what they do not say; one line.
    """
    purpose = arguments.purpose
    for name, needs in (("tokens", True), ("deadline", purpose == "deadline"), ("budget", purpose == "budget")):
        if needs and getattr(arguments, name) is None:
            raise CaseError(f"--purpose {purpose} needs --{name}, e.g. {_EXAMPLES[name]}")
    return Aim(
        purpose=purpose,
        tokens=arguments.tokens,
        price=arguments.price,
        deadline_hours=arguments.deadline,
        budget=arguments.budget,
    )


_EXAMPLES: Mapping[str, str] = {"tokens": "--tokens 10B", "deadline": "--deadline 24h", "budget": "--budget 1000"}


def asked(arguments: argparse.Namespace) -> tuple[list[Answer], list[str]]:
    """The answers to ``arguments``, and a line for each file, and for each purpose, that cannot be served.

    Raises:
        CaseError: as ``aim_of`` and ``of_baselines``.
    """
    aim, troubles = aim_of(arguments), list[str]()
    if arguments.points is not None:
        found = [of_points(aim, arguments.points, arguments.currency)]
    else:
        shelf = Shelf.read(arguments.perf_baselines, arguments.machine)
        found, troubles = of_baselines(aim, shelf, arguments.currency, arguments.model), list(shelf.broken.values())
    return found, [*troubles, *(f"{one.subject}: nothing serves the purpose" for one in found if not one.choice.best)]


def of_points(aim: Aim, given: Mapping[int, float], currency: str) -> Answer:
    """The answer for figures that somebody says."""
    options = [Option("given points", gpus, rate, given.get(1)) for gpus, rate in sorted(given.items())]
    return Answer("given points", options, aim, choose(options, aim), currency)


def of_baselines(aim: Aim, shelf: Shelf, currency: str, model: str | None = None) -> list[Answer]:
    """The answer for each stored model, or for one.

    Raises:
        CaseError: several machine kinds, whose hours have different prices, or nothing of this model; one line.
    """
    series = all_series(shelf)
    machines = sorted({plain(one.machine) for one in series})
    if len(machines) > 1:
        raise CaseError(
            f"{shelf.root}: baselines of {len(machines)} machine kinds, expected one; "
            f"choose with --machine: {', '.join(machines)}"
        )
    models = sorted({plain(one.spec.model) for one in series})
    if not series or (model is not None and model not in models):
        known = f", expected one of {', '.join(models)}" if models else ""
        raise CaseError(f"{model or shelf.root}: no training is stored{known}; record some with --update-baselines=new")
    found = []
    for name in models if model is None else [model]:
        options = _options([one for one in series if plain(one.spec.model) == name], series)
        subject = f"{name} on {machines[0]}"
        found.append(Answer(subject, options, aim, choose(options, aim), currency))
    return found


def _options(series: Sequence[Series], everything: Sequence[Series]) -> list[Option]:
    ones = {one.spec: one.rates[1] for one in everything if 1 in one.baselines}
    found = []
    for one in series:
        # One GPU has nothing to share: DDP's figure serves every parallelism.
        rate_of_one = one.rates.get(1) or ones.get(replace(one.spec, gpus=1, parallelism="ddp"))
        for gpus, rate in one.rates.items():
            name = one.baselines[gpus].id
            found.append(Option(plain(name), gpus, rate, rate_of_one, power_watts(one.baselines[gpus])))
    return sorted(found, key=lambda option: (option.gpus, -option.rate))


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
    """Which option, or why none."""
    best, aim = answer.choice.best, answer.aim
    if best is None:
        return [_impossible(answer)]
    hours, price = _hours(best.hours(aim.tokens)), _cost(aim.cost(best), answer)
    lines = [f"{_name(best)}: {hours}, {price}"]
    if answer.choice.ties:
        others = ", ".join(map(_name, answer.choice.ties))
        less = "cost" if cost.PURPOSES[aim.purpose] == "time" else "time"
        lines.append(f"a tie within {cost.TIE * 100:g} %, decided by {less}: {others}")
    return lines


def _impossible(answer: Answer) -> str:
    aim, options = answer.aim, answer.options
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
    if option == answer.choice.best:
        return "best"
    if option in answer.choice.ties:
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
