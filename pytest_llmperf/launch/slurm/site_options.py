"""Site: how a launch starts on the nodes of one's own cluster. Every start of pytest loads it: it imports little."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from pytest_llmperf.support.redaction import is_secret


@dataclass(frozen=True, kw_only=True)
class SlurmOptions:
    """What a site's ini file says about how a launch starts there."""

    prefix: tuple[str, ...] = ()
    """Goes before the command on each node: ``singularity exec --nv image.sif``."""
    modules: tuple[str, ...] = ()
    """``module load`` these on each node first."""
    srun: tuple[str, ...] = ()
    """More options for srun."""
    python: str = ""
    """The Python on the nodes; empty is the one that runs pytest."""
    scratch: str = ""
    """A folder that each node has for itself; empty is its ``TMPDIR``, else ``/tmp``."""
    cpu_bind: str = "none"
    """``--cpu-bind`` of srun: torchrun's ranks share a task, which may use all CPUs that the job has on the node."""

    def wrapped(self, command: Sequence[str], variables: dict[str, str]) -> list[str]:
        """``command`` as a node runs it: modules first, then the container, then the variables, inside of it.

        A command line is public (``ps``): secrets come by srun's own environment, or not at all.
        """
        said = [f"{name}={value}" for name, value in sorted(variables.items()) if not is_secret(name, value)]
        words = [*self.prefix, "env", *said, *command]
        if not self.modules:
            return words
        # `module` is a function of the login shell.
        return ["bash", "-lc", f'module load {shlex.join(self.modules)} && exec "$@"', "llmperf", *words]
