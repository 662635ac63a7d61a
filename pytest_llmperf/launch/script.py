"""A user's own training command as a launch: its folder and environment, and the record made of its ranks' shares.

Nothing of the command is changed. A private folder on PYTHONPATH brings the hooks into its processes; once each rank
has left its share, the whole tree of processes is ended where it stands.
"""

from __future__ import annotations

import json
import os
import sys
import sysconfig
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from pytest_llmperf.launch.process import Ended
from pytest_llmperf.launch.request import LaunchRequest
from pytest_llmperf.records import trace as traces
from pytest_llmperf.records.launch import ENVIRONMENT_FILE, RECORD_FILE, SHARE_FILE, Environment, Launch, RankRecord
from pytest_llmperf.records.trained import Share, merged
from pytest_llmperf.settings.script_spec import ScriptSpec
from pytest_llmperf.support import codec
from pytest_llmperf.support.files import write_text

_PACKAGE = Path(__file__).parents[1]
_HOOKS = _PACKAGE / "worker" / "script" / "path"

# What the hooks need beside torch, taken from here where the command's Python has none.
_LIBRARIES = ("msgspec", "psutil")

#: What a launched script does not do: send anything away. Its own environment, and ``env=``, come after these.
QUIET = {"WANDB_MODE": "offline", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


@dataclass(frozen=True)
class ScriptLaunch:
    """One launch of a script, whose request is written."""

    spec: ScriptSpec
    folder: Path
    """The launch's."""
    here: Path
    """The folder that the command is written for."""
    work: Path
    """Where it runs."""
    python: str
    started_at: str

    @classmethod
    def of(cls, request: LaunchRequest) -> ScriptLaunch | None:
        """Make what the hooks are found by, and the folder in which the command runs; ``None``: a recipe trains."""
        spec, folder = request.spec, request.folder
        if not isinstance(spec, ScriptSpec):
            return None
        libraries = [Path(str(import_module(name).__file__)).parent for name in _LIBRARIES]
        for name, sources in (("package", [_PACKAGE]), ("libraries", libraries)):
            (folder / name).mkdir()
            for source in sources:
                (folder / name / source.name).symlink_to(source)
        here = work = spec.folder(request.root)
        if spec.workdir == "scratch":
            work = folder / "work"
            work.mkdir()
            for entry in here.iterdir():
                (work / entry.name).symlink_to(entry)
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        return cls(spec, folder, here, work, request.python, now)

    @property
    def command(self) -> list[str]:
        """Its words; a file of its folder is named in full: it is the user's own wherever the command runs."""
        is_file = ((word, not word.startswith("-") and (self.here / word).is_file()) for word in self.spec.argv)
        return [str(self.here / word) if named else word for word, named in is_file]

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """What keeps the script quiet where nobody says otherwise, its own, and the way in."""
        made = {**{name: value for name, value in QUIET.items() if name not in inherited}, **self.spec.env}
        paths = [str(_HOOKS), made.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))]
        # ``python`` and ``torchrun`` are those of the Python that is asked for.
        is_ours = self.python == sys.executable
        programs = sysconfig.get_path("scripts") if is_ours else str(Path(self.python).parent)
        made["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        made["PATH"] = os.pathsep.join(filter(None, [programs, made.get("PATH", inherited.get("PATH", ""))]))
        return made | {"LLMPERF_SCRIPT": str(self.folder)}

    def is_over(self) -> bool:
        """Whether every rank has left its share, or one the reason of its end."""
        return any(self.folder.glob("failure-*.json")) or (self.spec.end == "park" and bool(self._shares()))

    def recorded(self, ended: Ended) -> Ended:
        """Make one record of the shares of all ranks, where they are there: how the command ended then says nothing."""
        shares = self._shares()
        if not shares or any(self.folder.glob("failure-*.json")):
            return ended
        where = codec.read(Environment, json.loads((self.folder / ENVIRONMENT_FILE).read_text(encoding="utf-8")))
        evidence = merged([each.evidence for each in shares])
        first = shares[0]
        launch = Launch(
            spec_id=self.spec.id,
            digest=self.spec.digest,
            started_at=self.started_at,
            wall_seconds=0.0,
            train_seconds=first.train_seconds,
            warmup_steps=self.spec.warmup_steps,
            parameters=first.parameters,
            losses=first.losses,
            ranks=tuple(self._with_tokens(each.record, evidence, len(shares)) for each in shares),
            evidence=evidence | ({"tokens": self.spec.rate_unit} if self.spec.given_tokens else {}),
            environment=replace(where, loaded=first.loaded),
            trace=traces.merged([each.trace for each in shares]),
        )
        write_text(self.folder / RECORD_FILE, json.dumps(codec.plain(launch)), lasts=False)
        return replace(ended, returncode=0, timed_out=False)

    def _with_tokens(self, record: RankRecord, evidence: Mapping[str, Any], ranks: int) -> RankRecord:
        """``record`` with the tokens that the user told; where nobody knows them each step counts as one."""
        given = self.spec.given_tokens
        if given is None and evidence.get("tokens") != "unknown":
            return record
        return replace(record, tokens_per_step=max(1, given // ranks) if given else 1, step_tokens=())

    def _shares(self) -> Sequence[Share]:
        """Those of all ranks in their order; none where one is missing."""
        with suppress(OSError, ValueError):
            first = self._share(0)
            return [first, *map(self._share, range(1, first.world))]
        return ()

    def _share(self, rank: int) -> Share:
        return codec.read(Share, json.loads((self.folder / SHARE_FILE.format(rank)).read_text(encoding="utf-8")))
