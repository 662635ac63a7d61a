"""The options that are about SLURM: whether and how launches start there, requeues, what it may cost."""

from __future__ import annotations

import shlex

import pytest

from pytest_llmperf.launch.slurm.site_options import SlurmOptions
from pytest_llmperf.support import quantities
from pytest_llmperf.support.quantities import argument

LAUNCHERS = ("auto", "local", "slurm")

_INI = {
    "prefix": "goes before the command on each node, e.g. singularity exec --nv image.sif",
    "modules": "modules to load on each node first",
    "srun": "more options for srun",
    "python": "the Python on the nodes, e.g. of the container (the one that runs pytest)",
    "scratch": "a folder that each node has for itself (its TMPDIR)",
    "cpu_bind": "srun's --cpu-bind (none)",
}


def add_options(group: pytest.OptionGroup) -> None:
    """Register the command line's."""
    group.addoption(
        "--perf-launcher",
        choices=LAUNCHERS,
        default="auto",
        help="how torchrun is started: on this machine, or by srun in a SLURM job (auto: in a job, by srun)",
    )
    group.addoption(
        "--perf-resume",
        action="store_true",
        help="in a SLURM job that was requeued: cases that it concluded before are not run again",
    )
    group.addoption(
        "--perf-budget",
        type=argument(quantities.positive, "a number of GPU-hours above 0"),
        metavar="GPU_HOURS",
        help="in a SLURM job: start nothing more once its GPUs were held for so long, requeues included; "
        "with --perf-dry-run anywhere: fail where the cases alone would take more",
    )


def add_ini(parser: pytest.Parser) -> None:
    """Register the ini file's: what is a site's."""
    for name, what in _INI.items():
        parser.addini(f"perf_slurm_{name}", f"SLURM: {what}", default="")


def read(config: pytest.Config) -> SlurmOptions:
    """What the ini file says.

    Raises:
        pytest.UsageError: a value that is no words of a shell.
    """
    words = {name: str(config.getini(f"perf_slurm_{name}")).strip() for name in _INI}
    found = {}
    for name in ("prefix", "modules", "srun"):
        try:
            found[name] = tuple(shlex.split(words[name]))
        except ValueError as error:
            raise pytest.UsageError(f"ini perf_slurm_{name} = {words[name]}: not words of a shell ({error})") from None
    cpu_bind = words["cpu_bind"] or SlurmOptions.cpu_bind
    return SlurmOptions(**found, python=words["python"], scratch=words["scratch"], cpu_bind=cpu_bind)
