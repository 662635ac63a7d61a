"""Places: the lines of Python at which a step asks for a tensor's content, waits, copies, or exchanges with others.

Of traced steps that are alike the last one is looked at, of a script's all: nobody times them. PyTorch warns of what
waits for a GPU. Functions of which it does not warn, and those that copy, are wrapped meanwhile. Nothing waits on the
CPU; there the functions that ask for a tensor's content are wrapped. Of exchanges, PyTorch keeps a record for ranks
that hang, of every backend. It is read after the traced steps, to which nothing is added.

Of a script on a CPU also which lines call PyTorch, or are called by these, and where it is, at which a thread looks."""

from __future__ import annotations

import functools
import linecache
import math
import pickle
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode

from pytest_llmperf.observe import device as gpu
from pytest_llmperf.observe.environment import INSTALLED, STDLIB, Project
from pytest_llmperf.records.trace import LEADS_TO, MOST_PLACES, SPENT, TraceRow
from pytest_llmperf.support.redaction import without_secrets

_HOME, _WATCHING = Path(__file__).parents[1], (__file__, gpu.__file__)
_TORCH = Path(torch.__file__).parent

# Of a tensor: what gives its content to Python, and what may make another one of the same content.
_ASKS = "item tolist numpy __bool__ __float__ __int__ __index__"
_COPIES = "to cpu cuda type float half bfloat16 double clone contiguous copy_"

# A line is read at a glance; how often a thread looks where the host is.
_WIDTH, _LOOK_SECONDS = 60, 0.002


class Places:
    """Those between ``begin`` and ``end``."""

    def __init__(self, device: torch.device, project: Project | None = None, *, looks_on: bool = False) -> None:
        """``looks_on``: at a script on a CPU. A GPU's host has to stay ahead of it."""
        self._on_gpu, self._looks_on = gpu.is_gpu(device), looks_on
        name_of = functools.cache(project.name_of if project else lambda _: "")
        # A line of the project's as it is shown; empty of any other.
        self._own = functools.cache(lambda file, line: (name := name_of(file)) and _shown(name, file, line))
        self._found: dict[str, Any] = {kind: Counter() for kind in ("wait", "copy", "operator", SPENT)}
        self._inside = threading.local()  # the kinds of the wrapped calls that a thread is in
        self._undo = ExitStack()

    def begin(self) -> None:
        asks = [(torch.Tensor, name) for name in _ASKS.split()]
        for owner, name in [(owner, "synchronize") for owner in gpu.WAITING] if self._on_gpu else asks:
            self._wrap(owner, name, "wait", lambda *_: True)
        for name in _COPIES.split():
            self._wrap(torch.Tensor, name, "copy", functools.partial(_is_copy, name, on_gpu=self._on_gpu))
        if self._on_gpu:
            self._undo.enter_context(gpu.heard_of_waits(self._waited))
        if self._looks_on:
            self._look_on()
            dynamo, others = sys.modules.get("torch._dynamo.utils"), torch._C._len_torch_function_stack()  # noqa: SLF001
            # What was compiled would be compiled anew, and others' modes have their own order.
            if not (others or (dynamo and dynamo.counters["stats"])):
                asked = torch.overrides.has_torch_function
                torch.overrides.has_torch_function = _has_own_class  # a mode says yes, which nn.Transformer heeds
                self._undo.callback(setattr, torch.overrides, "has_torch_function", asked)
                self._undo.callback(_Calls(self._called).__enter__().end)

    def _look_on(self) -> None:
        """At this thread, from another one."""
        watched, is_over = threading.get_ident(), threading.Event()

        def look() -> None:
            last = time.monotonic()
            while not is_over.wait(_LOOK_SECONDS):
                places = self.place(_frames(sys._current_frames().get(watched)))  # noqa: SLF001 - its stack
                last, before = time.monotonic(), last
                self._found[SPENT].update(dict.fromkeys(places, last - before))

        thread = threading.Thread(target=look, name="llmperf-places", daemon=True)
        thread.start()
        self._undo.callback(thread.join)
        self._undo.callback(is_over.set)

    def end(self) -> None:
        """All is as it was before ``begin``."""
        self._undo.close()

    def found(self, steps: int = 1) -> dict[str, dict[str, float]]:
        """By kind and place how often in each of so many ``steps``; kinds that have none are absent."""
        return {kind: _kept(found, steps) for kind, found in self._found.items() if found}

    def _waited(self) -> None:
        if not getattr(self._inside, "wait", False):
            self._found["wait"].update(self._here())

    def _wrap(self, owner: Any, name: str, kind: str, counts: Callable[..., bool]) -> None:
        function, is_own, inside = getattr(owner, name), name in vars(owner), self._inside

        @functools.wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if getattr(inside, kind, False):  # of nested calls the outermost counts
                return function(*args, **kwargs)
            setattr(inside, kind, True)
            try:
                result = function(*args, **kwargs)
            finally:
                setattr(inside, kind, False)
            if counts(result, args):
                self._found[kind].update(self._here())
            return result

        setattr(owner, name, watched)
        self._undo.callback(*((setattr, owner, name, function) if is_own else (delattr, owner, name)))

    def _here(self) -> list[str]:
        return self.place(_frames(sys._getframe(1)))  # noqa: SLF001 - this thread's stack

    def _called(self) -> None:
        """For each line of the project that led here."""
        self._found["operator"].update({self._own(*each) for each in _frames(sys._getframe(1))} - {""})  # noqa: SLF001 - as above

    def place(self, frames: Iterable[tuple[str, int]]) -> list[str]:
        """The innermost line of the project, and the line of a package to which it led; our own calls have none."""
        inner, is_first = "", True
        for file, line in frames:
            whose = _whose(file)
            if whose == "ours" and is_first and file not in _WATCHING:
                return []
            if whose in {"ours", "python"}:
                continue
            is_first = False
            own = "" if whose == "torch" else self._own(file, line)
            if own:
                return [LEADS_TO.join(filter(None, [own, inner]))]
            if not inner and whose != "torch":
                parts = Path(file).parts  # shown from its package on
                at = max((index for index, part in enumerate(parts) if part in INSTALLED), default=len(parts) - 2)
                inner = _shown("/".join(parts[at + 1 :]), file, line)
        return [inner] if inner else []


class _Calls(TorchFunctionMode):
    """Hears of the functions of PyTorch that Python calls; to look at a tensor's shape is none."""

    def __init__(self, called: Callable[[], None]) -> None:
        super().__init__()
        self._called = called

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") != "__get__":
            self._called()
        return func(*args, **(kwargs or {}))

    def end(self) -> None:
        """In a call that it hears of, as a backward pass in which a step ends, it is aside, and comes back silent."""
        self._called = lambda: None
        if _get_current_function_mode() is self:
            self.__exit__(None, None, None)


def _has_own_class(tensors: Iterable[Any]) -> bool:
    """What ``has_torch_function`` says where there is no mode."""
    none = torch._C._disabled_torch_function_impl  # noqa: SLF001 - as parameters have it
    kinds = {type(each) for each in tensors} - {torch.Tensor}
    return any(getattr(kind, "__torch_function__", none) is not none for kind in kinds)


def _frames(frame: FrameType | None) -> list[tuple[str, int]]:
    """File and line of each, from the innermost one outwards."""
    found = []
    while frame is not None:
        found.append((frame.f_code.co_filename, frame.f_lineno or 0))  # of another thread it may have none
        frame = frame.f_back
    return found


def _kept(found: Counter[str], steps: int) -> dict[str, float]:
    """How often a step, of the most frequent ones: of those that a line of the project asks for itself first, since a
    package may ask in more places than are kept."""
    places = sorted(found.most_common(), key=lambda place: LEADS_TO in place[0])
    return {place: count / steps for place, count in places[:MOST_PLACES]}


@functools.cache
def _whose(file: str) -> str:
    """``ours``, ``torch``, or ``python`` of its library and of no file; empty of anybody else's."""
    for whose, start in (("ours", f"{_HOME}/"), ("torch", f"{_TORCH}/"), ("python", "<")):
        if file.startswith(start):
            return whose
    is_installed = any(f"/{folder}/" in file for folder in INSTALLED)
    return "python" if Path(file).is_relative_to(STDLIB) and not is_installed else ""


def _shown(name: str, file: str, line: int) -> str:
    text = without_secrets(" ".join(linecache.getline(file, line).split()))
    text = text if len(text) <= _WIDTH else f"{text[: _WIDTH - 3]}..."
    return f"{name}:{line} {text}".rstrip()


def _is_copy(name: str, result: Any, args: tuple[Any, ...], *, on_gpu: bool) -> bool:
    """Whether another tensor has the content now, of a GPU on another device: a change of type is a kernel there."""
    source = args[1] if name == "copy_" and len(args) > 1 else args[0]
    if not (isinstance(result, torch.Tensor) and isinstance(source, torch.Tensor)):
        return False
    return source.device != result.device if on_gpu else result is not source


# Exchanges with other ranks: by kind, dimension of the mesh, and bytes.

# What PyTorch calls its types there.
_BITS = {"Byte": 8, "Char": 8, "Bool": 8, "Short": 16, "Half": 16, "BFloat16": 16, "Int": 32, "Float": 32}
_BITS |= {"Long": 64, "Double": 64, "ComplexFloat": 64, "ComplexDouble": 128}
_FLOAT8 = 8
# Groups that have no name of their own.
_UNNAMED = {"default_pg", "undefined", ""}
_NAMES = {
    "allgather": "all_gather",
    "allreduce": "all_reduce",
    "alltoall": "all_to_all",
    "all_reduce_barrier": "barrier",
}
#: A line of a file that asked, from the innermost one outwards.
Frames = Iterable[tuple[str, int]]


class Exchanges(NamedTuple):
    rows: tuple[TraceRow, ...] = ()
    """How many of each kind, and their bytes."""
    places: Mapping[str, float] = {}
    """By line, how many; the most frequent."""


def recorded(dist: Any) -> bytes:
    """PyTorch's record of exchanges, pickled; empty before the ranks have met."""
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return b""
    from torch._C import _distributed_c10d as c10d  # noqa: PLC0415 - torch is there by now

    return bytes(getattr(c10d, gpu.collectives_record(dist.get_backend()))())


def exchanges(record: bytes, ends: Sequence[int], place: Callable[[Frames], Sequence[str]]) -> Exchanges:
    """Return those of a step: the mean of the steps between ``ends``, in nanoseconds since 1970. Where the record does
    not reach back to the first one, or there is none, nothing is known: nothing is returned."""
    entries = pickle.loads(record)["entries"] if record else []  # noqa: S301 - this process wrote it
    ours = [entry for entry in entries if ends[0] < entry["time_created_ns"] <= ends[-1]]
    if not ours or (ours[0] is entries[0] and entries[0]["record_id"] > 0):
        return Exchanges()
    counts, sizes, places = Counter[str](), Counter[str](), Counter[str]()
    for entry in ours:
        group = str((entry.get("process_group") or ("", ""))[1])
        name = exchange_name(str(entry["profiling_name"]).partition(":")[2].split(" ")[0], group)
        counts[name] += 1
        sizes[name] += _bytes(entry)
        places.update(place((frame["filename"], frame["line"]) for frame in entry["frames"]))
    steps = len(ends) - 1
    rows = [TraceRow("exchange", name, count / steps, 0.0) for name, count in counts.items()]
    rows += [TraceRow("payload", name, size / steps, 0.0) for name, size in sizes.items() if size]
    return Exchanges(tuple(rows), _kept(places, steps))


def exchange_name(function: str, group: str) -> str:
    """``all_gather``, ``reduce_scatter of shard``: by the function that is called, and the mesh's dimension."""
    kind = re.sub(r"^_|_+$|(_base|(_into)?_tensor|_coalesced|_single)_?$", "", function)
    group = "" if group in _UNNAMED else group.removeprefix("mesh_")
    return f"{_NAMES.get(kind, kind)}{group and f' of {group}'}"


def _bytes(entry: Mapping[str, Any]) -> int:
    """Of the whole: what is gathered, scattered or reduced, as one rank has it."""
    sides = (zip(entry[f"{side}_sizes"], entry[f"{side}_dtypes"], strict=False) for side in ("input", "output"))
    return max(sum(math.prod(shape) * _bits(kind) // 8 for shape, kind in side) for side in sides)


def _bits(dtype: str) -> int:
    return _BITS.get(dtype, _FLOAT8 if dtype.startswith("Float8") else 0)
