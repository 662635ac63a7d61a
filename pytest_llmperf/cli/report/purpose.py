"""``llmperf report --purpose``: which case and how many GPUs serve a purpose."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace

from pytest_llmperf.cli.baseline_folder import Shelf
from pytest_llmperf.cli.command_error import CaseError
from pytest_llmperf.cli.option_types import amount, currency, duration, points, tokens
from pytest_llmperf.cli.report.purpose_pages import Answer
from pytest_llmperf.cli.scaling_series import Series, all_series, power_watts
from pytest_llmperf.cli.screen import plain
from pytest_llmperf.cli.spec_arguments import named
from pytest_llmperf.insight.cost import Aim, Option, choose_each
from pytest_llmperf.spec.same_training import training_of
from pytest_llmperf.spec.train_spec import TrainSpec


def add_options(report: argparse.ArgumentParser) -> None:
    """What `--purpose` goes by."""
    group = report.add_argument_group("--purpose")
    group.add_argument("--tokens", metavar="T", type=tokens, help="to train on, e.g. 10B")
    group.add_argument("--price", metavar="P", type=amount, help="of a GPU-hour; left out: costs are GPU-hours")
    what = "of the price, default: %(default)s"
    group.add_argument("--currency", metavar="NAME", type=currency, default="EUR", help=what)
    group.add_argument("--deadline", metavar="TIME", type=duration, help="e.g. 24h, 2d or 90m")
    group.add_argument("--budget", metavar="N", type=amount, help="in the currency, or in GPU-hours without a price")
    group.add_argument("--points", metavar="N:RATE,…", type=points, help="GPUs and tokens/s per GPU, not baselines")
    only = group.add_mutually_exclusive_group()
    only.add_argument("--model", metavar="NAME", help="only this model's baselines")
    what = "only what trains as this stored case does: model, precision, optimizer and length"
    only.add_argument("--like", metavar="CASE", help=what)


def misplaced(arguments: argparse.Namespace) -> str | None:
    """The option that says nothing to what is asked."""
    of_purpose = ("tokens", "price", "deadline", "budget", "points", "like")
    of_tables, of_losses = ("samples", "steps", "hours"), ("at",)
    if arguments.purpose:
        options: tuple[str, ...] = (*of_tables, *of_losses)
    elif arguments.html:
        options = ("machine", *of_purpose, *of_tables, *of_losses)
    else:
        options = (*of_purpose, *(of_tables if arguments.losses else of_losses))
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
        if arguments.like is not None:
            raise CaseError("--like says nothing to --points, which are of one training; leave one of them out")
        found = [of_points(aim, arguments.points, arguments.currency)]
    else:
        shelf = Shelf.read(arguments.perf_baselines, arguments.machine)
        like = _like(arguments)
        model = arguments.model if like is None else plain(like.model)
        found, troubles = of_baselines(aim, shelf, arguments.currency, model, like), shelf.troubles
    return found, [*troubles, *(f"{one.subject}: nothing serves the purpose" for one in found if not one.serves)]


def _like(arguments: argparse.Namespace) -> TrainSpec | None:
    if arguments.like is None:
        return None
    (case,) = named([arguments.like], arguments.perf_baselines, arguments.machine)
    return case.spec


def of_points(aim: Aim, given: Mapping[int, float], currency: str) -> Answer:
    """The answer for figures that somebody says."""
    options = [Option("given points", gpus, rate, given.get(1)) for gpus, rate in sorted(given.items())]
    return Answer("given points", options, aim, choose_each(options, aim), currency)


def of_baselines(
    aim: Aim, shelf: Shelf, currency: str, model: str | None = None, like: TrainSpec | None = None
) -> list[Answer]:
    """The answer for each stored model, or for one; of what trains ``like`` a spec alone, where one is given.

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
        if like is not None:
            options = _alike(options, like)
        subject = f"{name} on {machines[0]}"
        found.append(Answer(subject, options, aim, choose_each(options, aim), currency))
    return found


def _alike(options: Sequence[Option], like: TrainSpec) -> list[Option]:
    found = [option for option in options if option.training == training_of(like)]
    if not found:
        stored = "; ".join(sorted({option.training for option in options}))
        raise CaseError(f"--like {like.id}: nothing that is stored trains like it ({training_of(like)}), but: {stored}")
    return found


def _options(series: Sequence[Series], everything: Sequence[Series]) -> list[Option]:
    ones = {one.spec: one.rates[1] for one in everything if 1 in one.baselines}
    found = []
    for one in series:
        # One GPU has nothing to share: DDP's figure serves every parallelism.
        rate_of_one = one.rates.get(1) or ones.get(replace(one.spec, gpus=1, parallelism="ddp"))
        for gpus, rate in one.rates.items():
            name = one.baselines[gpus].id
            power, training = power_watts(one.baselines[gpus]), training_of(one.spec)
            found.append(Option(plain(name), gpus, rate, rate_of_one, power, training))
    return sorted(found, key=lambda option: (option.gpus, -option.rate))
