"""``llmperf script -- COMMAND``: what could be held of a user's own training, found out by two short launches of it."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

from pytest_llmperf.cli.answer import Answer, CaseError, Screen, add_shared, plain, table
from pytest_llmperf.cli.asked_run import Terminal, asked_run, usage_errors
from pytest_llmperf.judge.repeats import Launches, Repeats
from pytest_llmperf.launch.script import HOOKS, link_package
from pytest_llmperf.records.metrics import METRICS, RATE, label, measured
from pytest_llmperf.report.text import Column
from pytest_llmperf.run.findings import CannotRunError, CaseFailedError, RunEndedError
from pytest_llmperf.run.history import find_revision, project_of
from pytest_llmperf.run.reading import usual_observed
from pytest_llmperf.settings.spec import ScriptSpec
from pytest_llmperf.support import formats

# Fields of a ScriptSpec that have an option of their name.
_OPTIONS = ("steps", "tokens", "step", "cwd", "seed", "end", "workdir")
# They would change a run.
_NOT_WATCHED = ("steps", "cwd", "seed", "end", "workdir", "gpus")
_NUMBERS = ("steps", "seed", "tokens", "step")
_COLUMNS = ("what", "found", "held")
# Names the folder in which a run that is watched leaves its row.
_OBSERVE, _PTH = "LLMPERF_OBSERVE", "llmperf_hook.pth"


def add_options(parser: argparse.ArgumentParser) -> None:
    add_shared(parser, "script")
    for name in _OPTIONS:
        parser.add_argument(f"--{name}", metavar=name.upper())
    add = parser.add_argument
    add("--observe", action="store_true")
    add("--trace-at", metavar="STEP", type=int)
    add("--hook-path", action="store_true")
    add("--install-hook", action="store_true")
    add("--remove-hook", action="store_true")
    parser.add_argument("command", metavar="COMMAND", nargs=argparse.REMAINDER)
    parser.set_defaults(answer=_answer)


def named_script(arguments: argparse.Namespace) -> ScriptSpec:
    """The spec that the command line names; CaseError: none, or one that cannot be."""
    if not (words := arguments.command[arguments.command[:1] == ["--"] :]):
        usual = "llmperf script -- torchrun --nproc-per-node 2 train.py"
        raise CaseError(f"no command is named; expected one after --, e.g. {usual}")
    given: dict[str, Any] = {name: text for name in _OPTIONS if (text := getattr(arguments, name)) is not None}
    given |= {name: int(text) for name, text in given.items() if name in _NUMBERS and text.isdecimal()}
    if not Path(cwd := given.get("cwd", ".")).is_dir():
        raise CaseError(f"--cwd {cwd}: no such folder; expected the one in which the command is written to run")
    try:
        spec = ScriptSpec(command=words[0] if len(words) == 1 else shlex.join(words), **given)
        told = spec.gpus > 1 or not arguments.gpus or "{gpus}" not in spec.command
        return spec if told else ScriptSpec(command=spec.command, gpus=arguments.gpus, **given)
    except ValueError as error:
        raise CaseError(str(error)) from error


def _tried(spec: ScriptSpec, arguments: argparse.Namespace, troubles: list[str], screen: Screen) -> Iterator[str]:
    """Launch it twice, and show what of it was the same; ``troubles``: why it did not train."""
    run, terminal = asked_run(arguments, launches=2, calibration=False), Terminal()
    with usage_errors(arguments):
        run.begin([spec])
    try:
        yield from page(spec, run.cases("llmperf script", terminal).measure(spec), screen, run.num_gpus)
    except (CaseFailedError, CannotRunError, RunEndedError) as error:
        troubles += str(error).splitlines()
    finally:
        run.finish(0, terminal)


def page(spec: ScriptSpec, launches: Launches, screen: Screen, gpus: int) -> Iterator[str]:
    """What a record would hold, what not, and the test that guards it."""
    first, last = launches[0], launches[-1]
    steps, ranks = len(first.step_seconds), len(first.ranks)
    yield f"{spec.command}: {len(launches)} launches of {steps} steps on {formats.counted(ranks, 'rank')}"
    cells = zip(*_rows(spec, launches), strict=True)
    columns = [Column(name, [*map(plain, each)], right=False) for name, each in zip(_COLUMNS, cells, strict=True)]
    yield from ("", *table(columns, screen), "")
    for note in dict.fromkeys(note for launch in launches for note in launch.evidence.get("remarks", ())):
        yield f"note: {plain(note)}"
    if different := first.differences(last):
        yield f"different in the two launches: {'; '.join(map(plain, different))}"
    yield "exactly: it was the same in both launches"
    yield "not claimed: what the script learns, and that its update is right; this is no loop of this plugin"
    yield from ("", *_test(spec, gpus))


def _rows(spec: ScriptSpec, launches: Launches) -> Iterator[tuple[str, str, str]]:
    """What, how much, and how a record holds it, by what the two launches had in common."""
    first, repeats = launches[0], Repeats.of(launches)
    rate = measured(launches)[RATE]
    seconds = " and ".join(dict.fromkeys(formats.seconds(each.median_step_seconds) for each in launches))
    ends = first.evidence.get("optimizer", "unknown") if spec.step == "auto" else spec.step
    yield "a step ends with", str(ends), "timed as it is"
    speed = formats.tokens_per_second(rate.read([first]))
    yield "speed", f"{speed} {rate.label} ({seconds} a step)", "within its tolerance"
    if first.evidence.get("tokens") == "unknown":
        yield "tokens a step", formats.ABSENT, "not found: say --tokens"
    else:
        varies = ", not all steps alike" if first.ranks[0].step_tokens else ""
        yield f"{spec.rate_unit} a step", f"{first.tokens_per_step:,}{varies}", "exactly" if repeats.tokens else "not"
    if repeats.losses is None:
        yield "losses", formats.ABSENT, "not: backward does not begin with one number"
    else:
        band = "as a band" + (f": the same up to step {repeats.losses}" if repeats.losses else "")
        held = "exactly" if repeats.losses == len(first.losses) else band
        yield "losses", f"{first.losses[0]:.4f} to {first.losses[-1]:.4f}", held
    for name in (*repeats.counts, *repeats.ranges):
        low, high = repeats.ranges.get(name, (0, 0))
        how = "exactly" if name in repeats.counts else f"as a range: {low:,.6g} to {high:,.6g}"
        counted = first.trace.count(name)
        yield label(name), formats.memory(counted) if METRICS[name].unit == "bytes" else f"{counted:,.6g}", how
    if not first.trace:
        yield "a traced step", formats.ABSENT, f"not: {first.trace.none}"
    yield "peak memory", formats.memory(first.peak_reserved_bytes), "within its tolerance"
    if first.ranks[0].allocated_bytes:
        grown = first.allocated_growth
        found = formats.ABSENT if grown is None else f"{formats.memory(grown)} more"
        leak = "not: too few steps for that" if grown is None else "as a slope: a leak"
        yield "memory after each step", found, "exactly" if repeats.memory else leak


def _test(spec: ScriptSpec, gpus: int) -> Iterator[str]:
    """Ready to paste, for a project whose tests are started at the top of its git work tree."""
    here = Path(spec.cwd).resolve()
    top = next((each for each in (here, *here.parents) if (each / ".git").exists()), here)
    values = {**vars(spec), "cwd": here.relative_to(top).as_posix()}
    usual = {each.name: each.default for each in fields(ScriptSpec)}
    words = [f"{name}={_quoted(values[name])}" for name in _OPTIONS if values[name] != usual[name]]
    name = "test_" + re.sub(r"\W", "_", spec.slug)
    yield f"# {name}.py"
    yield f"def {name}(perf):"
    yield f"    perf.script({', '.join([_quoted(spec.command), *words])})"
    yield f"# pytest {name}.py --gpus {gpus} --update-baselines=new"


def _quoted(value: object) -> str:
    """As a formatter has it."""
    return f'"{value}"' if isinstance(value, str) and not set(value) & {'"', "\\"} else repr(value)


def _answer(arguments: argparse.Namespace, screen: Screen) -> Answer:
    if arguments.hook_path:
        return Answer([str(HOOKS)], for_programs=True)
    if arguments.install_hook or arguments.remove_hook:
        return Answer([install_hook() if arguments.install_hook else remove_hook()])
    if arguments.observe:
        if changed := [f"--{name}" for name in _NOT_WATCHED if getattr(arguments, name) is not None]:
            raise CaseError(f"{changed[0]}: --observe sets nothing of a run; it goes with --tokens, --step, --trace-at")
        if arguments.trace_at is not None and arguments.trace_at < 1:
            raise CaseError(f"--trace-at {arguments.trace_at}: expected the number of a step, from 1 on")
        observe(named_script(arguments), arguments.trace_at, Terminal().say)
    if arguments.trace_at:
        raise CaseError("--trace-at is of a run that is watched: it goes with --observe")
    spec, troubles = named_script(arguments), list[str]()
    return Answer(_tried(spec, arguments, troubles, screen), troubles, acts=True)


# Real runs are watched by a hook: in a run that is started with it, or by a ``.pth`` in a whole Python.
def observe(spec: ScriptSpec, trace_at: int | None, say: Any) -> NoReturn:
    """Become the command: its output, folder, signals and exit code are its own from here on."""
    here, program = Path.cwd(), spec.argv[0]
    if shutil.which(program) is None:
        raise CaseError(f"{program}: no such program on PATH; expected the command as you run it, e.g. python train.py")
    folder = usual_observed() / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    folder.mkdir(parents=True)
    link_package(folder)
    found = find_revision(here, here / "baselines")
    revision = found.commit + "+" * bool(found.commit and found.changed)
    order = {"spec": spec.to_dict(), "trace_at": trace_at, "revision": revision, "project": project_of(here)}
    (folder / "request.json").write_text(json.dumps(order), encoding="utf-8")
    say(f"{spec.id} is watched and nothing of it is changed; its row: {folder}, shown by llmperf history {spec.id}")
    paths = os.pathsep.join(filter(None, [str(HOOKS), os.environ.get("PYTHONPATH", "")]))
    os.execvpe(program, spec.argv, {**os.environ, "PYTHONPATH": paths, _OBSERVE: str(folder)})  # noqa: S606 - no shell is asked for


def install_hook() -> str:
    """Bring it into every process of this Python with the variable set; the user's own sitecustomize runs as well."""
    place, file = Path(sysconfig.get_path("purelib"), _PTH), str(HOOKS / "sitecustomize.py")
    run = (
        f"exec(compile(open({file!r}).read(), {file!r}, 'exec'), {{'__name__': 'llmperf_hook', '__file__': {file!r}}})"
    )
    try:
        place.write_text(f"import os; os.environ.get({_OBSERVE!r}) and {run}\n", encoding="utf-8")
    except OSError as why:
        raise CaseError(f"{place}: not written ({why.strerror}); expected a Python of your own, a venv say") from why
    return f"wrote {place}: without {_OBSERVE}=FOLDER it does nothing; llmperf script --remove-hook removes it"


def remove_hook() -> str:
    file = Path(sysconfig.get_path("purelib"), _PTH)
    if not file.exists():
        raise CaseError(f"{file}: no hook is installed there")
    file.unlink()
    return f"removed {file}"
