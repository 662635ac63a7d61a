"""Hardware: where a run's launches go, what they may use, as its settings ask for it, and the job that holds it.

``UsageError`` says that the site cannot serve or lacks GPUs, ``RunEndedError`` that all nodes of a job are lost and
another start may go on. That has what is kept of each case as it is concluded: on the shared file system beside the
runs, in a folder named by the job, which a requeue does not change."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_llmperf.launch.site import AllNodesLostError, Site, SiteError, Wanted
from pytest_llmperf.launch.slurm.controller import job_key, uses_slurm
from pytest_llmperf.run.findings import UNFINISHED, CaseFailedError, Concluded, RunEndedError, UsageError
from pytest_llmperf.run.options import Settings
from pytest_llmperf.support import codec, formats
from pytest_llmperf.support.files import file_name, private_folder

if TYPE_CHECKING:
    from pytest_llmperf.judge.baseline import BaselineStore
    from pytest_llmperf.launch.device import Gpu
    from pytest_llmperf.launch.machine import Machine

# GPUs that a run which launches nothing may use, where nobody says how many: more than any case asks for.
_ANY = 1_000_000

_KEPT_RUNS = 10
_RUN_NAME = re.compile(r"\d{8}-\d{6}-(\w+-)?\d{1,9}")
_UNTOUCHED_SECONDS = 24 * 3600.0


class Hardware:
    def __init__(
        self,
        settings: Settings,
        *,
        rootdir: Path,
        arguments: Sequence[str] = (),
        shared_gpus: Sequence[str] = (),
        is_worker: bool = False,
    ) -> None:
        """``arguments`` tell one run of a SLURM job from its others. ``is_worker``: other processes share the run, and
        ``shared_gpus``, by uuid, where not all are the run's."""
        self.settings, self.rootdir, self.arguments = settings, rootdir, tuple(arguments)
        self.shared_gpus, self.is_worker = tuple(shared_gpus), is_worker

    @cached_property
    def store(self) -> BaselineStore:
        from pytest_llmperf.judge.baseline import BaselineStore

        return BaselineStore(self.settings.baselines)

    @cached_property
    def site(self) -> Site:
        settings = self.settings
        wanted = Wanted(
            gpus=settings.gpus,
            start=settings.start,
            overlap=settings.overlap,
            slurm=settings.slurm,
            folder=lambda: self.run_folder,
        )
        if uses_slurm(settings.launcher, os.environ):
            from pytest_llmperf.launch.slurm.slurm_site import SlurmSite

            return SlurmSite(wanted, os.environ)
        from pytest_llmperf.launch.local import LocalSite

        return LocalSite(wanted)

    def _machine_of_site(self) -> Machine:
        try:
            return self.site.machine()
        except SiteError as error:
            # An exit of xdist's worker is a crash.
            if isinstance(error, AllNodesLostError) and self.settings.resume and not self.is_worker:
                raise RunEndedError(str(error), UNFINISHED) from None
            raise UsageError(f"--perf-launcher {self.settings.launcher}: {error}") from None
        except ValueError as error:
            raise UsageError(f"--gpus: {error}") from error

    @cached_property
    def job(self) -> Job:
        """Keeps what the next start of its job needs; nothing where none comes."""
        key = self.site.key if self._goes_on else ""
        return Job(self.rootdir / ".llmperf" / "jobs", key, self.arguments, resume=self.settings.resume)

    @cached_property
    def _goes_on(self) -> bool:
        """Whether another start of a job can go on with this run; a ``UsageError`` where an option needs that."""
        settings = self.settings
        if uses_slurm(settings.launcher, os.environ) and job_key(os.environ):
            return True
        if settings.resume:
            raise UsageError("--perf-resume: not in a SLURM job that launches by srun; leave it out, or use sbatch")
        return False

    @property
    def in_job(self) -> bool:
        """Whether this is a job's run, also one that launches on its first node alone."""
        return self._goes_on or bool(job_key(os.environ))

    @property
    def machine(self) -> Machine:
        """Found on first use: a run without a perf test never asks the driver. One with fewer GPUs than ``--gpus`` is
        a ``UsageError``, unless this is a dry run: a nightly job must not go green on a dead GPU."""
        return self._found[0]

    @cached_property
    def _found(self) -> tuple[Machine, str]:
        """The machine as this run may use it, and a line about what of it is assumed."""
        from pytest_llmperf.launch.machine import Machine

        settings = self.settings
        if settings.static:  # the same on every machine, so none is asked for
            return Machine(gpus=(), cpu_name="", cores=os.cpu_count() or 1), ""
        machine = self._machine_of_site()
        asked, limit, assumed = settings.gpus, settings.memory_limit_bytes, ""
        if asked is not None and asked > len(machine.gpus):
            have = f"--gpus {asked}: only {len(machine.gpus)} GPU(s) {self.site.where}"
            if not settings.dry_run:
                raise UsageError(f"{have}; {self.site.for_more}, or ask for fewer (--gpus 0 is the CPU)")
            machine, assumed = self._with_assumed(machine, asked, have)
        least = min((gpu.memory_bytes for gpu in machine.gpus), default=0)
        if asked != 0 and 0 < least < limit:
            raise UsageError(
                f"--perf-memory-limit {formats.memory(limit)}: the GPU has {formats.memory(least)}; "
                "a limit can only be lower"
            )
        return machine, assumed

    def _with_assumed(self, machine: Machine, gpus: int, have: str) -> tuple[Machine, str]:
        """``machine`` with as many GPUs, and a line that says what it has (``have``) and on what the estimates rest. A
        login node may tell what a job would do."""
        from pytest_llmperf.launch.device import UNKNOWN

        missing, named = gpus - len(machine.gpus), self.settings.machine
        kinds = [kind for kind in self.store.machines() if "cpu" not in kind.split("-")]
        if named in kinds or (machine.gpus and not named):
            line = f"{have}; {missing} assumed, with the times of {named or 'those'}"
        else:
            nobodys = f"; there are none of {named}" if named else ""
            line = f"{have}, and so no baseline tells how long a case takes{nobodys}; say which do with "
            line += "-o perf_machine=KIND" + (f" ({', '.join(kinds)})" if kinds else "")
        return replace(machine, gpus=(*machine.gpus, *([*machine.gpus, UNKNOWN][:1] * missing))), line

    @property
    def num_gpus(self) -> int:
        """GPUs that this run may use; 0 is the CPU."""
        asked = self.settings.gpus
        if self.settings.static:
            return _ANY if asked is None else asked
        return len(self.machine.gpus) if asked is None else min(asked, len(self.machine.gpus))

    @property
    def on_cpu(self) -> bool:
        return self.num_gpus == 0

    @cached_property
    def chosen(self) -> list[str]:
        """By uuid, what the workers of a parallel run share where it may use fewer GPUs than there are; else none."""
        asked = self.settings.gpus
        if not self.site.is_here or not asked or asked >= len(self.machine.gpus):
            return []
        from pytest_llmperf.launch.machine import undisturbed_first

        return [gpu.uuid for gpu in undisturbed_first(self.machine.gpus)[:asked]]

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """Those of which launches may lease; one process alone takes whichever are free, and never more than asked."""
        return tuple(gpu for gpu in self.machine.gpus if not self.shared_gpus or gpu.uuid in self.shared_gpus)

    @property
    def memory_bytes(self) -> int:
        """Memory that each rank may hold; 0: whatever the CPU's host has."""
        if self.settings.memory_limit_bytes or self.on_cpu:
            return self.settings.memory_limit_bytes
        return min(gpu.memory_bytes for gpu in self.machine.gpus)

    @property
    def machine_kind(self) -> str:
        """With the digest it keys a baseline. A limit of memory makes another machine of it."""
        name, limit = self.settings.machine, self.settings.memory_limit_bytes
        if self.settings.static:
            kind = name or "static"
        elif self.on_cpu:  # a site names its machine once, and its CPU's figures must never meet its GPU's
            kind = f"{name}-cpu" if name else self.machine.cpu_kind
        else:
            try:
                kind = name or self.machine.gpu_kind
            except ValueError as error:  # of several kinds, and nobody has named it
                raise UsageError(str(error)) from error
        return kind + (f"-limit-{limit / 2**30:g}gib" if limit else "")

    def machine_document(self) -> dict[str, Any]:
        gpus = () if self.settings.static else self.machine.gpus[: self.num_gpus]
        return {
            "kind": self.machine_kind,
            "cores": self.machine.cores,
            "gpus": [{"name": gpu.name, "memory_bytes": gpu.memory_bytes, "uuid": gpu.uuid} for gpu in gpus],
        }

    def job_document(self) -> dict[str, Any]:
        """Of the SLURM job around this run, also one that launches on its first node alone; nothing without one."""
        restarts = os.environ.get("SLURM_RESTART_COUNT", "")
        starts = 1 + (int(restarts) if restarts.isdigit() else 0)
        return {"slurm": {"job": job, "starts": starts}} if (job := job_key(os.environ)) else {}

    @cached_property
    def run_folder(self) -> Path:
        """Where this run keeps its launches' logs and records: ``.llmperf/`` under rootdir, or a temporary folder."""
        return new_run_folder(self.rootdir / ".llmperf", self.site.key or None)

    def launch_folder(self, spec_id: str) -> Path:
        """In it, that of the next launch of this name."""
        name = file_name(spec_id)
        return self.run_folder / f"{name}-{1 + sum(1 for _ in self.run_folder.glob(f'{name}-*'))}"


def new_run_folder(home: Path, job: str | None) -> Path:
    """In ``home``, or a temporary one; that of a ``job``, which all its nodes see, or a ``CaseFailedError``."""
    try:
        home.mkdir(exist_ok=True)
        (home / ".gitignore").write_text("*\n", encoding="ascii")
        return _new_in(home, job)
    except OSError as error:  # a read-only checkout
        if job is not None:
            raise CaseFailedError(
                f"{home}: not usable ({error}); a SLURM run keeps its files where all nodes see them"
            ) from None
        try:  # beside the user's others, of which the last ones are kept
            return _new_in(private_folder(Path(tempfile.gettempdir()) / f"pytest-llmperf-runs-{os.getuid()}"), None)
        except OSError:  # somebody else has prepared it
            return Path(tempfile.mkdtemp(prefix="llmperf-"))


def _new_in(home: Path, job: str | None) -> Path:
    """Two runs of one process may begin in one second: the later one is named by the next."""
    prune(home)
    # Two hosts that share this folder may have the same pid in the same second, and not the same job.
    whose, began = f"{'' if job is None else f'{job}-'}{os.getpid()}", time.time()
    while True:
        folder = home / f"{time.strftime('%Y%m%d-%H%M%S', time.localtime(began))}-{whose}"
        with suppress(FileExistsError):
            folder.mkdir()
            return folder
        began += 1


def prune(home: Path) -> None:
    """Remove all but the newest in which nobody writes any more; the run that begins is one of those kept."""
    import psutil

    for old in sorted(path for path in home.iterdir() if _RUN_NAME.fullmatch(path.name))[: -_KEPT_RUNS + 1]:
        with suppress(OSError):  # somebody else prunes it
            # It may be of another host or container, where its pid is another's: then only what was written tells.
            changed = max(path.stat().st_mtime for path in (old, *old.iterdir()))
            is_alive = psutil.pid_exists(int(old.name.rpartition("-")[2]))
            if not is_alive and time.time() - changed > _UNTOUCHED_SECONDS:
                shutil.rmtree(old, ignore_errors=True)


_KEPT_SECONDS = 14 * 24 * 3600.0


class Job:
    """The cases that one job has concluded, through its restarts."""

    def __init__(self, home: Path, key: str, arguments: Sequence[str], *, resume: bool = False) -> None:
        """``arguments`` are pytest's: a job may run the suite more than once, each time with others. Only a run that is
        to ``resume`` goes on with what is there. With an empty ``key``, as nothing starts it anew, nothing is kept."""
        self.folder, self._arguments, self._resume = home / key, [str(word) for word in arguments], resume
        self._is_kept = bool(key)
        with suppress(OSError):
            for old in home.iterdir() if key else ():
                with suppress(OSError):  # a stray file, or a job that another run forgets just now
                    if time.time() - max(path.stat().st_mtime for path in (old, *old.iterdir())) > _KEPT_SECONDS:
                        shutil.rmtree(old, ignore_errors=True)

    def find(self, nodeid: str, digest: str) -> Concluded | None:
        return codec.load(Concluded, self._path(nodeid, digest)) if self._resume else None

    def keep(self, concluded: Concluded) -> str:
        """A line about what went wrong, if anything did."""
        if not self._is_kept:
            return ""
        result = concluded.result
        why = codec.keep(self._path(result.nodeid, result.digest), concluded, lasts=True)
        return f"{result.id}: not kept for a requeue ({why})" if why else ""

    def _path(self, nodeid: str, digest: str) -> Path:
        what = json.dumps([nodeid, digest, self._arguments])
        return self.folder / f"{hashlib.sha256(what.encode()).hexdigest()[:24]}.json"
