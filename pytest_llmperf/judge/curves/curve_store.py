"""CurveStore: loss curves as files, ``<root>/loss-curves/<spec id>.json``. I/O through ``judge.store``."""

from __future__ import annotations

import tempfile
from pathlib import Path

from pytest_llmperf.judge.baseline_file import BaselineError
from pytest_llmperf.judge.loss_curves import LOSS_CURVES, CurveBaseline
from pytest_llmperf.judge.store import Entry, file_name, read, replace_whole
from pytest_llmperf.settings.train_spec import TrainSpec


class CurveStore:
    """Under one folder."""

    def __init__(self, root: Path) -> None:
        # No search of the machine kinds' baselines looks so near the root.
        self._folder = root / LOSS_CURVES

    def path(self, spec: TrainSpec) -> Path:
        """Where the curves of ``spec`` are, or would be."""
        return self._folder / f"{file_name(spec.id)}.json"

    def load(self, spec: TrainSpec) -> CurveBaseline | None:
        """The curves, or ``None`` where there is no file.

        Raises:
            BaselineError: a file that is there and cannot serve.
        """
        path = self.path(spec)
        found = read(path, CurveBaseline.from_json)
        if found is not None and found.digest != spec.digest:
            raise BaselineError(
                f"{path}: it is of digest {found.digest}, expected {spec.digest} for {spec.id}; "
                "delete it and record anew with --update-baselines=new"
            )
        return found

    def check_writable(self, spec: TrainSpec) -> None:
        """Find out before a launch whether its curve could be recorded.

        Raises:
            BaselineError: the folder cannot be made or written.
        """
        folder = self.path(spec).parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise BaselineError(
                f"{folder}: loss curves cannot be recorded here ({error.strerror}); "
                "name a folder that can be written with --perf-baselines"
            ) from error

    def record(self, spec: TrainSpec, judged: CurveBaseline | None, new: CurveBaseline) -> Path:
        """Keep ``new`` in the place of ``judged``; the file.

        Raises:
            BaselineError: another run changed what is there, or it cannot be written.
        """
        path = self.path(spec)

        def change(old: CurveBaseline | None) -> CurveBaseline:
            if old != judged:
                raise BaselineError(f"{spec.id}: another run changed {path} meanwhile; run again to be held against it")
            return new

        replace_whole(path, lambda: self.load(spec), change)
        return path

    def entries(self, *, on_cpu: bool) -> list[Entry]:
        """The files of cases for the CPU or for GPUs, sorted by path.

        Raises:
            BaselineError: a file that cannot be read.
        """
        found = ((path, read(path, CurveBaseline.from_json)) for path in sorted(self._folder.glob("*.json")))
        return [
            Entry(path=path, id=one.id, digest=one.digest, recorded_by=one.recorded_by)
            for path, one in found
            if one is not None and one.on_cpu == on_cpu
        ]
