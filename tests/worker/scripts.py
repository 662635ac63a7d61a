"""Scripts under the hooks, many in one process: what a test compares is their own clock and what was seen of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from pytest_llmperf import ScriptSpec
from pytest_llmperf.launch.process import python_path
from pytest_llmperf.records.ranks import Share
from pytest_llmperf.support import codec

FOLDER = Path(__file__).parents[1] / "scripts"


@dataclass(frozen=True)
class Seen:
    """What became of one script."""

    folder: Path

    @property
    def ended(self) -> Any:
        """``parked``, ``failed``, or its own code."""
        return json.loads((self.folder / "ended.json").read_text(encoding="utf-8"))

    @property
    def share(self) -> Share:
        path = self.folder / "share-0.json"
        assert path.exists(), (self.folder / "log.txt").read_text(encoding="utf-8")[-3000:] + self.message
        return codec.read(Share, json.loads(path.read_text(encoding="utf-8")))

    @property
    def message(self) -> str:
        """Why there is no share."""
        found = [json.loads(path.read_text(encoding="utf-8")) for path in self.folder.rglob("failure-*.json")]
        return str(found[0]["message"]) if found else ""

    @property
    def own(self) -> list[list[Any]]:
        """Of each step, as the script itself says: when it ended, its loss, and its tokens."""
        return [json.loads(line) for line in (self.folder / "clock-0").read_text(encoding="utf-8").splitlines()]

    @property
    def seconds_apart(self) -> float:
        """By how much step times differ at least in all but the first two, in which the model is looked for.

        On a busy machine the script may wait between the hook and its own clock. Steps that are taken for others
        differ by 2 ms and more: no two neighbours are alike.
        """
        own = [end[0] - begin[0] for begin, end in zip(self.own, self.own[1:], strict=False)][1:]
        apart = [abs(one - seen) for one, seen in zip(own, self.share.trained.record.step_seconds[2:], strict=False)]
        return sorted(apart)[1]

    @property
    def usual_seconds(self) -> float:
        return median(self.share.trained.record.step_seconds[2:])

    def is_late(self) -> bool:
        """Whether the script's own clock disagrees; without a share nothing does, and a test of that says why."""
        if not (self.folder / "share-0.json").exists():
            return False
        return self.seconds_apart >= max(0.01 * self.usual_seconds, 0.001)


@dataclass
class Scripts:
    """Those of one file, each by its name and what its spec says beside that."""

    folder: Path
    script: str
    imports: Sequence[str] = ()
    _listed: list[dict[str, Any]] = field(default_factory=list)
    _run: int = 0

    def add(self, name: str, environment: Mapping[str, str] | None = None, **words: Any) -> Seen:
        """``words`` of its spec."""
        folder = self.folder / f"{len(self._listed)}-{name}"
        folder.mkdir()
        spec = ScriptSpec(command=f"python {self.script} {name}", **{"steps": 12, "warmup_steps": 2, **words})
        request = {"spec": spec.to_dict(), "root": str(FOLDER), "memory_limit_bytes": 0}
        (folder / "request.json").write_text(json.dumps(request), encoding="utf-8")
        listed = {"folder": str(folder), "words": [str(FOLDER / self.script), name], "imports": self.imports}
        self._listed.append(listed | {"environment": environment or {}, "parks": spec.end == "park", "ranks": 1})
        return Seen(folder)

    def run(self) -> None:
        """Those that were added since."""
        path = self.folder / "scripts.json"
        path.write_text(json.dumps(self._listed[self._run :]), encoding="utf-8")
        self._run = len(self._listed)
        variables = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        environment = {**os.environ, **variables, **python_path(str(FOLDER.parents[1]), os.environ)}
        command = [sys.executable, str(FOLDER / "forks.py"), str(path)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
