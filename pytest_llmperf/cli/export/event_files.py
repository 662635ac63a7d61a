"""Files that TensorBoard reads, by tensorboardX, which the extra ``tensorboard`` has."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from pytest_llmperf.report.consumers.tensorboard import EventPoint
from pytest_llmperf.support.files import write_bytes

_VERSION = "brain.Event:2"


def missing() -> str:
    """What is not installed of what these take, and what installs it, in a line; imports nothing of it."""
    if find_spec("tensorboardX") is not None:
        return ""
    return "TensorBoard's files take tensorboardX, which is not installed; pip install 'pytest-llmperf[tensorboard]'"


def write_points(folder: Path, points: Sequence[EventPoint]) -> None:
    """A file for each of ``points``, each whole or as it was.

    Raises:
        OSError: the first that cannot be written.
    """
    for point in points:
        write_bytes(folder / point.folder / point.file_name, _events(point))


def _events(point: EventPoint) -> bytes:
    from tensorboardX.proto.event_pb2 import Event  # noqa: PLC0415 - only who writes these has it
    from tensorboardX.record_writer import RecordWriter  # noqa: PLC0415
    from tensorboardX.summary import scalar, text  # noqa: PLC0415

    step = int(point.seconds)
    summaries = [*(scalar(tag, value) for tag, value in point.scalars.items()), text("verdict", point.verdict)]
    events = [Event(wall_time=point.seconds, step=step, summary=summary) for summary in summaries]
    with tempfile.TemporaryDirectory() as folder:  # its records go to files alone
        path = Path(folder) / "events"
        writer = RecordWriter(str(path))
        for event in (Event(wall_time=point.seconds, file_version=_VERSION), *events):
            writer.write(event.SerializeToString())
        writer.close()
        return path.read_bytes()
