"""A user's own training command as a launch: its folder and environment, and the record made of its ranks' shares.

Nothing of the command is changed. A private folder on PYTHONPATH brings the hooks into its processes; once each rank
has left its share, the whole tree of processes is ended where it stands."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from importlib import import_module
from itertools import takewhile
from pathlib import Path
from typing import Any, cast

import psutil

from pytest_llmperf.launch.device import NO_GPU, VISIBLE, Gpu, wait_until_left
from pytest_llmperf.launch.process import Ended, WholeTree, ask, signal_name
from pytest_llmperf.launch.request import LaunchRequest
from pytest_llmperf.records.failure import Failure, Progress, said
from pytest_llmperf.records.launch import ENVIRONMENT_FILE, NO_RANKS, RECORD_FILE, SHARE_FILE, Environment, RankRecord
from pytest_llmperf.records.ranks import ASKS, Share, launch_of, merged_evidence
from pytest_llmperf.settings.spec import ScriptSpec, told_ranks
from pytest_llmperf.support import codec
from pytest_llmperf.support.files import write_text
from pytest_llmperf.support.redaction import redacted

_PACKAGE = Path(__file__).parents[1]
# What the hooks need beside torch, taken from here where the command's Python has none.
_LIBRARIES = ("msgspec", "psutil")
_SCRIPT_FILE = "script.json"
_WAY_IN = "LLMPERF_SCRIPT"
# Whose first file is the script.
_STARTERS = ("python", "torchrun", "accelerate", "deepspeed")
# Seconds in which a launcher tells of ranks that went, once one has left its reason.
_LAST_WORDS = 3.0
# What a trace has of ranks that train one model.
_EXCHANGED = ("exchange", "collective")
# Of a small form: enough to know which optimizer ends a step.
_MOST_STEPS = 30


def small_form(spec: ScriptSpec, home: Path, root: Path, seconds: float) -> LaunchRequest:
    """A launch of the ``tiny`` command of ``spec`` on this machine's CPU, for a few steps, in a folder in ``home``."""
    few, ranks = min(spec.steps, max(_MOST_STEPS, spec.warmup_steps + 2)), spec.gpus if "{gpus}" in spec.tiny else 0
    env = {**spec.env, **NO_GPU}
    small = replace(spec, command=spec.tiny, tiny="", name=f"{spec.id}-tiny", gpus=ranks, steps=few, env=env)
    folder = home / f"{small.id}-{1 + sum(1 for _ in home.glob(f'{small.id}-*'))}"
    return LaunchRequest(spec=small, folder=folder, gpus=(), timeout_seconds=seconds, root=root)


@dataclass(frozen=True)
class ScriptLaunch:
    spec: ScriptSpec
    folder: Path
    work: Path
    command: Sequence[str]
    variables: Mapping[str, str]
    started_at: str

    @classmethod
    def of(cls, request: LaunchRequest) -> ScriptLaunch | None:
        """Make what the hooks are found by, and the folder in which the command runs; ``None``: a recipe trains."""
        spec, folder = request.spec, request.folder
        if not isinstance(spec, ScriptSpec):
            return None
        here = work = spec.folder(request.tree or request.root)
        if not here.is_dir():
            root = request.root.resolve()
            raise FileNotFoundError(f"cwd={spec.cwd!r}: {here} is no folder; it is named beside {root}")
        link_package(folder)
        if spec.workdir == "scratch":
            work = folder / "work"
            work.mkdir()
            # What is in no revision, data say, is there as it is.
            entries = [*here.iterdir(), *(spec.folder(request.root).iterdir() if request.tree else ())]
            for name, entry in {entry.name: entry for entry in reversed(entries)}.items():
                # Not the launch itself: who follows links, in the script or after it, would walk in a circle.
                if not folder.resolve().is_relative_to(entry.resolve()):
                    (work / name).symlink_to(entry)
        words, now = [_in_full(word, here) for word in spec.argv], time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        return cls(spec, folder, work, words, set_for(request, os.environ) | {_WAY_IN: str(folder)}, now)

    def leave(self) -> None:
        """Leave what a node's agent starts it by."""
        values = vars(self) | {"spec": self.spec.to_dict(), "folder": str(self.folder), "work": str(self.work)}
        write_text(self.folder / _SCRIPT_FILE, json.dumps(values), lasts=False)

    @classmethod
    def left_in(cls, folder: Path) -> ScriptLaunch | None:
        if not (folder / _SCRIPT_FILE).exists():
            return None
        left = json.loads((folder / _SCRIPT_FILE).read_text(encoding="utf-8"))
        return cls(**left | {"spec": ScriptSpec(**left["spec"]), "folder": folder, "work": Path(left["work"])})

    def check(self, path: str) -> None:
        """Raise FileNotFoundError where its program, on this ``path``, or its script is not there."""
        program, script = self.command[0], self.command[self.spec.script]
        starts_it = Path(program).name.startswith(_STARTERS) and script.endswith(".py") and " " not in script
        missing = ""

        def nearest(name: str, *folders: Path) -> str:
            named = {each for folder in folders for each in next(os.walk(folder), ("", [], []))[2]}  # that may be read
            return "".join(f" ({each}?)" for each in get_close_matches(name, sorted(named), 1, 0.8))

        if shutil.which(program, path=path) is None:
            near = nearest(program, *map(Path, path.split(os.pathsep)), self.work)
            missing = f"{program} is not found on PATH{near}; install it, or name it in full"
            if Path(program).is_file():  # as ``./train.py``
                missing = f"{program} may not be executed; write python before it, or chmod +x"
        elif starts_it and not (self.work / script).is_file():
            near = nearest(Path(script).name, (self.work / script).parent)
            missing = f"{script} is not in the folder of the command (cwd={self.spec.cwd!r}){near}"
        if missing:
            self._unlink()
            raise FileNotFoundError(missing)

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """What keeps the script quiet, its own variables, and the way in; ``inherited`` is of where it starts."""
        kept = {name: value for name, value in inherited.items() if name not in UNSET} | dict(self.variables)
        own = self.spec.env.get("PATH", inherited.get("PATH", ""))
        return kept | {"PATH": os.pathsep.join(filter(None, [self.variables["PATH"], own]))}

    def tree(self) -> WholeTree:
        """All that its command starts."""
        return WholeTree(f"{_WAY_IN}={self.folder}")

    def ask(self, node: str) -> None:
        """Let its ranks write down what they do; before there are any, what has torch and started nothing that has."""
        pids = {path.stem.partition("-")[2]: path.read_text() for path in self.folder.glob("rank-*.pid")}
        seen = [path.name.partition("-")[2] for path in self.folder.glob("seen-*") if path.read_text() == "torch"]
        found, parents = dict[str, psutil.Process](), set[int]()
        for rank, pid in (pids or {pid: pid for pid in seen}).items():
            with suppress(psutil.Error, ValueError):
                process = psutil.Process(int(pid))
                if process.environ().get(_WAY_IN) == str(self.folder):
                    parents.add(process.ppid())
                    found[rank] = process
        ask({rank: one for rank, one in found.items() if one.pid not in parents}, self.folder, node, ASKS)

    def is_over(self) -> bool:
        """Whether every rank has left its share, or one, some seconds ago, the reason of its end; asked often."""
        # Meanwhile a launcher says which rank went first: peers of a killed one only tell of a connection that broke.
        with suppress(OSError):
            if any(time.time() - path.stat().st_mtime > _LAST_WORDS for path in self.folder.glob("failure-*.json")):
                return True
        return self.spec.end == "park" and bool(self._shares())

    def recorded(self, ended: Ended, gpus: Sequence[Gpu]) -> Ended:
        """Make one record of all ranks' shares, how it ended being a remark then. ``gpus``: those it was to use."""
        shares, told = self._shares(), any(self.folder.glob("failure-*.json"))
        if not (shares or told or ended.timed_out):
            for path in (self.folder / NO_RANKS).glob("failure-*.json"):
                if ended.returncode or json.loads(path.read_text(encoding="utf-8"))["kind"] == "refused":
                    told = bool(path.replace(self.folder / path.name))
        elif shares and not told and (why := self._refused(shares, gpus)):
            told, ended = True, replace(ended, timed_out=False)
            refusal = {"kind": "refused", "message": why, "tail": [], "time": time.time()}
            write_text(self.folder / "failure-0.json", json.dumps(refusal), lasts=False)
        if told or not shares:  # a rank says why, however the command ended
            return replace(ended, returncode=ended.returncode or int(told))
        where = codec.read(Environment, json.loads((self.folder / ENVIRONMENT_FILE).read_text(encoding="utf-8")))
        ranks = [each.trained for each in shares]
        evidence, traces = merged_evidence([each.evidence for each in ranks]), [each.trace for each in shares]
        if any(each.evidence.get("tokens") == "unknown" for each in ranks):  # a stage of a pipeline embeds none
            evidence["tokens"] = "unknown"
        losses = next((each.losses for each in ranks if each.losses), ())  # of a pipeline its last stage knows them
        evidence = {name: value for name, value in evidence.items() if name != "losses" or not losses}
        remarks = [*evidence.get("remarks", ())]
        if self.spec.end == "script" and (ended.timed_out or ended.returncode):
            how = "was ended at its time limit" if ended.timed_out else f"ended with {ended.returncode}"
            remarks.append(f"the command {how}, after what was measured")
        rows = [row for each in traces for row in each.rows]
        if rows and len(shares) > 1 and not any(row.kind in _EXCHANGED or "c10d::" in row.name for row in rows):
            remarks.append(f"its {len(shares)} ranks exchange nothing in a step: each trains a model of its own")
        evidence |= {"remarks": remarks} if remarks else {}
        facts = {
            "ranks": tuple(self._with_tokens(each.record, evidence, len(ranks)) for each in ranks),
            "evidence": evidence | ({"tokens": self.spec.rate_unit} if self.spec.given_tokens else {}),
            "environment": replace(where, loaded=shares[0].loaded),
        }
        launch = launch_of(self.spec, self.started_at, replace(ranks[0], losses=losses), traces, **facts)
        write_text(self.folder / RECORD_FILE, json.dumps(codec.plain(launch)), lasts=False)
        return replace(ended, returncode=0, timed_out=False)

    def _refused(self, shares: Sequence[Share], gpus: Sequence[Gpu]) -> str:
        """Why its figures are of something else than was asked for; empty where they are not."""
        world, wanted = len(shares), self.spec.gpus
        if world != wanted:
            told = f"write {{gpus}} where its launcher takes the number of processes, or say gpus={world}"
            if told_ranks(self.spec) == wanted:
                told = f"its launcher started no more of those it was told of: tell it {world}, or use torchrun"
            return f"the script trained with {world} rank(s), expected gpus={wanted}; {told}"
        leased = [gpu.uuid.removeprefix("GPU-") for gpu in gpus]
        given = ", ".join(gpu.uuid for gpu in gpus) or "none, on the CPU (--gpus 0)"
        for each in (share.trained for share in shares):
            rank, used = each.record.rank, each.record.device
            if each.evidence.get("device_type", "cpu") != "cpu" and not any(uuid in used for uuid in leased):
                return f"rank {rank} trained on {used}, and its launch was given {given}; leave {VISIBLE} to the launch"
        return ""

    def closed(self, ended: Ended, gpus: Sequence[Gpu]) -> Ended:
        """``recorded``, and without links and unneeded scratch."""
        ended = self.recorded(ended, gpus)
        wait_until_left(gpus, {int(path.name.partition("-")[2]) for path in self.folder.glob("seen-*")})
        if ended.returncode == 0 and self.spec.end == "park":
            shutil.rmtree(self.folder / "work", ignore_errors=True)  # of a link it removes the link
        self._unlink()
        return ended

    def _unlink(self) -> None:
        """Remove links, lest a copy of the folder holds what they point to."""
        folders = [folder for name in ("package", "libraries", "work") if (folder := self.folder / name).is_dir()]
        for entry in (entry for folder in folders for entry in folder.iterdir() if entry.is_symlink()):
            entry.unlink()

    def _with_tokens(self, record: RankRecord, evidence: Mapping[str, Any], ranks: int) -> RankRecord:
        """``record`` with the tokens that the user told; where nobody knows them each step counts as one."""
        given = self.spec.given_tokens
        if given is None and evidence.get("tokens") != "unknown":
            return record
        return replace(record, tokens_per_step=max(1, given // ranks) if given else 1, step_tokens=())

    def _shares(self) -> Sequence[Share]:
        """Those of all ranks in their order; none where one is missing."""
        shares = list[Share]()
        with suppress(OSError, ValueError):
            while not shares or len(shares) < shares[0].world:
                text = (self.folder / SHARE_FILE.format(len(shares))).read_text(encoding="utf-8")
                shares.append(codec.read(Share, json.loads(text)))
            return shares
        return ()


def _in_full(word: str, here: Path) -> str:
    """A file of the command's folder ``here`` is the user's own wherever it runs, and what ``./`` begins. A word
    without a dot or a slash may be a choice that a file happens to be named as."""
    option, equals, path = word.rpartition("=")
    begins = path.startswith(("./", "../")) and os.path.normpath(path) != "."
    if begins and os.path.exists(here / path):  # noqa: PTH110 - one that is too long for a name is none
        return f"{option}{equals}{here / path}"
    is_file = word[:1] != "-" and {*word} & {*"./"} and os.path.isfile(here / word)  # noqa: PTH113 - as above
    return str(here / word) if is_file else word


def link_package(folder: Path) -> None:
    """Let hooks find this package in ``folder``, and what it needs, where the command's Python has neither."""
    libraries = [Path(str(import_module(name).__file__)).parent for name in _LIBRARIES]
    for name, sources in (("package", [_PACKAGE]), ("libraries", libraries)):
        (folder / name).mkdir()
        for source in sources:
            (folder / name / source.name).symlink_to(source)


#: Trackers keep what they would send. What the shell says of these does not count: only ``env=`` lets a launch send.
QUIET = {"WANDB_MODE": "offline", "COMET_START_ONLINE": "0", "NEPTUNE_MODE": "offline"}
QUIET |= {"CLEARML_OFFLINE_MODE": "1", "SWANLAB_MODE": "offline"}
#: Without these MLflow and Trackio write into the folder where they run.
UNSET = ("MLFLOW_TRACKING_URI", "TRACKIO_SPACE_ID")

#: The folder that brings hooks into the processes of a command.
HOOKS = _PACKAGE / "worker" / "script" / "path"
_PATHS = ("PATH", "PYTHONPATH")
_MOST_ENTRIES, _MOST_SHOWN = 4000, 3


@contextmanager
def announced(request: LaunchRequest, say: Callable[[str], None], said: set[str]) -> Iterator[None]:
    """Say once in a run what is set for scripts and where they run, and after it which of the user's files it wrote."""
    spec = request.spec
    if not isinstance(spec, ScriptSpec):
        yield
        return

    def say_once(line: str) -> None:
        if line not in said:
            said.add(line)
            say(line)

    here, began = spec.folder(request.tree or request.root), time.time()
    place = f"in {here} itself" if spec.workdir == "own" else f"in a folder of its own that shows the files of {here}"
    variables = redacted(set_for(request, os.environ))
    names = " ".join(shlex.quote(f"{name}={value}") for name, value in variables.items() if name not in _PATHS)
    dropped = "".join(f", without {name}" for name in UNSET if name in os.environ)
    ends = "nothing of it runs after its measured steps" if spec.end == "park" else "it runs to its own end"
    say_once(f"a training command runs {place}, with {names}{dropped}; {ends}")
    yield
    if written := [*_written(here, began)]:
        told = f"{', '.join(written[:_MOST_SHOWN])}{' and more' if len(written) > _MOST_SHOWN else ''}"
        line = f"{spec.id}: while it ran, it or somebody else wrote files of {here}: {told}"
        say_once(f"{line}; if they are the script's, give it another output folder")


def set_for(request: LaunchRequest, inherited: Mapping[str, str]) -> dict[str, str]:
    """What a launch of a script sets: it sends nothing away, and finds the hooks and the Python that is asked for. The
    latter's programs stand alone in ``PATH``, before those of wherever it starts."""
    own: dict[str, str] = {**request.variables, **cast("ScriptSpec", request.spec).env}
    is_ours = request.python == sys.executable
    # A package of the project that is installed here as editable is another revision's there.
    trees = [str(request.tree), str(request.tree / "src")] if request.tree else []
    paths = filter(None, [str(HOOKS), *trees, own.get("PYTHONPATH", inherited.get("PYTHONPATH"))])
    return {
        **QUIET,
        "HF_HUB_OFFLINE": inherited.get("HF_HUB_OFFLINE", "1"),
        **own,
        "PYTHONPATH": os.pathsep.join(paths),
        "PATH": sysconfig.get_path("scripts") if is_ours else str(Path(request.python).parent),
    }


def _written(here: Path, since: float) -> Iterator[str]:
    """Files below ``here`` that changed ``since``, of the first few thousand; hidden folders are tools'."""
    entries = 0
    for folder, folders, files in os.walk(here):
        folders[:] = [name for name in folders if not name.startswith(".") and name != "__pycache__"]
        entries += len(files) + len(folders)
        if entries > _MOST_ENTRIES:
            return
        for path in (Path(folder, name) for name in files):
            with suppress(OSError):
                if path.stat().st_mtime >= since:
                    yield str(path.relative_to(here))


_NO_HOOK = (
    "no Python process of it loaded our hook (python -I, -E or -S, PYTHONPATH set anew, or a sitecustomize before ours)"
    ": llmperf script --install-hook reaches these"
)
_OFFLINE = ("OfflineModeIsEnabled", "offline mode", "HF_HUB_OFFLINE")
_ENDED = ("error", "killed", "never-started")
_LAST = 60


def explained(failure: Failure, ended: Ended, progress: Progress, lines: Sequence[str]) -> Failure:
    """``failure`` in the words of a script, whose log has these ``lines``."""
    folder, message, last = Path(failure.folder), failure.message, lines[-_LAST:]
    name = signal_name(ended.returncode)
    how = f"the command{ended.where} " + (f"was ended by {name}" if name else f"ended with {ended.returncode}")
    is_untold = failure.rank is None and failure.kind in _ENDED
    short = next((line.strip() for line in (*failure.tail, *last) if said(line) == "plainly"), "")
    if short and failure.kind in _ENDED:
        return replace(failure, kind="oom", message=f"{how if is_untold else message}: {short}")
    if failure.kind == "timeout" and not progress.step:
        within = f"{ended.seconds:.0f} s"
        message = f"no optimizer step within {within}: {seen(folder)};{message.removeprefix(f'no end after {within},')}"
        if not any(folder.glob("rank-*.pid")):  # what hangs has no rank yet
            message = message.replace(" ranks ", " processes ").replace(" rank ", " process ")
    elif is_untold:
        why = f"its last line: {line}" if ended.returncode and (line := _said_last(lines)) else ""
        if progress.step:
            how += f" after step {progress.step}" + (f" of {progress.steps}" if progress.steps else "")
            why = why or ("somebody killed it" if name else "too few steps, os._exit, or a training in the background")
        else:
            how += " before its first optimizer step"
            is_unhooked = any(line.startswith("Traceback") for line in last) and not any(folder.glob("seen-*"))
            why += f"; {_NO_HOOK}" if is_unhooked else ""
        message = f"{how}: {why or seen(folder)}"
    if any(word in line for line in last for word in _OFFLINE):
        message += "; launches are offline: env={'HF_HUB_OFFLINE': '0'} lets the script download"
    return replace(failure, message=message)


def _said_last(lines: Sequence[str]) -> str:
    """The last line with words, before torchrun's report."""
    own = takewhile(lambda line: "torch/distributed/elastic" not in line, lines)
    return next((line.strip() for line in reversed([*own]) if any(map(str.isalpha, line))), "")


def seen(folder: Path) -> str:
    """What its processes have left of a training that has not made a step."""
    found = [path.read_text(encoding="ascii") for path in folder.glob("seen-*")]
    if any(folder.glob("rank-*.pid")):
        return "a backward pass was seen, and no call of a torch optimizer (by hand?): let one of torch.optim update it"
    if "torch" in found:
        return "torch was imported, and no backward pass seen (inference, or still loading?): name one that trains"
    return "no process of it imported torch: name a command that trains" if found else _NO_HOOK
