"""What a step runs, by name: operators, the kernels of Liger that it launches, and FLOPs, counted on fake tensors."""

from __future__ import annotations

import collections
import itertools
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from pytest_llmperf.worker.estimate.arithmetic import DEVICE, Arithmetic, QuickMode, replaced
from pytest_llmperf.worker.estimate.caching_allocator import Change

# What asks for a tensor's kind, and makes none: how often depends on who looks. The content of a fake tensor is known
# where it is the host's own (an optimizer's count of its steps), for which nobody waits.
_QUESTIONS = frozenset(
    f"aten::{name}"
    for name in (
        "_local_scalar_dense dim is_contiguous is_non_overlapping_and_dense is_same_size is_strides_like_format layout "
        "numel size storage_offset stride sym_is_contiguous sym_numel sym_size sym_storage_offset sym_stride"
    ).split()
)


class OperatorCounter:
    """Counts while one of its ``times`` is open."""

    def __init__(self, *, traffic: bool = False) -> None:
        """``traffic``: bytes are counted too, which takes its time."""
        self.operators: collections.Counter[str] = collections.Counter()
        """Without the names of their overloads, ``aten::mm`` say; Liger's kernels as ``liger::…``."""
        self.flops: collections.Counter[str] = collections.Counter()
        """By operator."""
        self.traffic: collections.Counter[str] = collections.Counter()
        """Bytes of tensors that each operator reads and writes, where that was asked for; of views and of Liger's
        kernels none."""
        self._counts_traffic = traffic
        self._now: collections.Counter[str] | None = None

    def called(self, name: str) -> None:
        """``name`` was called where no dispatcher sees it."""
        if self._now is not None:
            self._now[name] += 1

    @contextmanager
    def times(self, number: int) -> Iterator[None]:
        """What runs inside is run so often in a step."""
        counts = self._now = collections.Counter[str]()
        traffic: collections.Counter[str] = collections.Counter()

        def seen(name: str, values: Any) -> None:
            if name not in _QUESTIONS and not name.startswith(("prim::", "profiler::")):
                counts[name] += 1
            if self._counts_traffic and values:
                traffic[name] += _bytes_of(values)

        with Arithmetic(seen) as arithmetic:
            yield
        self._now = None
        totals = (self.operators, counts), (self.flops, arithmetic.by_operator), (self.traffic, traffic)
        for total, found in totals:
            for name, count in found.items():
                total[name] += count * number


def _bytes_of(values: Any) -> int:
    """Of the tensors in ``values``."""
    if isinstance(values, torch.Tensor):
        return values.numel() * values.element_size()
    return sum(map(_bytes_of, values)) if isinstance(values, list | tuple) else 0


# What operators gave on fake tensors, kept by what they were given: most layers of a step call what its first does.

# Of an argument, beside tensors and lists: these say all by their value.
_PLAIN = frozenset({bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})
# What comes out depends on the content of tensors, or another tensor is given another shape.
_OWN_WAY = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view)


class _Output(NamedTuple):
    """A tensor that came out; ``of``: which of the tensors given it is a view of, if of any."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    offset: int
    storage_bytes: int
    of: int | None


# By what was called with what; beside outputs whether the answer is one tensor, and so none of them ``None``. Of the
# whole process, as PyTorch's own: what one prediction has found serves the next.
_ANSWERS: dict[tuple[object, ...], tuple[Sequence[_Output | None], bool]] = {}


def known_output(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What ``function`` gives, called or made; to be asked within a dispatch mode, with a fake one below it."""
    tensors: list[FakeTensor] = []
    key: list[object] = [function, torch.get_default_dtype()]
    is_told = _follows_from_shapes(function) and _add(key, tensors, (*args, *kwargs, *kwargs.values()))
    if not (is_told and tensors):
        return function(*args, **kwargs)
    known = _ANSWERS.get(tuple(key))
    made = _made(*known, tensors) if known is not None else None
    if made is not None:
        return made
    answer = function(*args, **kwargs)
    if known is None:
        is_one = not isinstance(answer, tuple)
        found = [(each, _output(each, tensors)) for each in ([answer] if is_one else answer)]
        if all(output is not None or (each is None and not is_one) for each, output in found):
            _ANSWERS[tuple(key)] = [output for _, output in found], is_one
    return answer


@cache
def _follows_from_shapes(function: Any) -> bool:
    """Whether what ``function`` gives is new or a view, and told by the shapes of what it is given."""
    return (
        isinstance(function, torch._ops.OpOverload)  # noqa: SLF001 - it has no other name
        and function.namespace == "aten"
        and not function._schema.is_mutable  # noqa: SLF001
        and not any(tag in function.tags for tag in _OWN_WAY)
    )


def _add(key: list[object], tensors: list[FakeTensor], values: Sequence[Any]) -> bool:
    """Put into ``key`` what ``values`` say, and into ``tensors`` those among them; false: they say more than fits."""
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            dtype = value.dtype
            if value.constant is not None or dtype.is_complex or value.layout is not torch.strided:
                return False  # a number that is known is followed, and what is conjugated or sparse is no shape
            tensors.append(value)
            key += (dtype, value.shape, value.stride(), value.storage_offset(), value.requires_grad, value.fake_device)
        elif kind in _PLAIN:
            key += (kind, value)  # 1, 1.0 and True are the same to a dictionary
        elif kind is list or kind is tuple:
            key += (kind, len(value))
            if not _add(key, tensors, value):
                return False
        else:
            return False
    return True


def _output(tensor: Any, tensors: Sequence[FakeTensor]) -> _Output | None:
    """What there is to know of ``tensor``; ``None``: it cannot be made from that."""
    is_plain = type(tensor) is FakeTensor and tensor.constant is None and tensor.layout is torch.strided
    if not is_plain or tensor.dtype.is_complex or tensor.requires_grad or any(tensor is given for given in tensors):
        return None
    storage = tensor.untyped_storage()
    own = [number for number, given in enumerate(tensors) if given.untyped_storage() is storage]
    output = _Output(
        tuple(tensor.shape),
        tensor.stride(),
        tensor.dtype,
        tensor.fake_device,
        tensor.storage_offset(),
        storage.nbytes(),
        own[0] if own else None,
    )
    if output.of is None and (output.offset or _tensor(output).untyped_storage().nbytes() != output.storage_bytes):
        return None  # a part of something larger
    return output


def _made(outputs: Sequence[_Output | None], is_one: bool, tensors: Sequence[FakeTensor]) -> Any:
    """An answer; ``None``: there is none of these tensors, whose storages have another size."""
    made: list[FakeTensor | None] = []
    for output in outputs:
        if output is None:
            made.append(None)
            continue
        tensor = _tensor(output)
        if output.of is not None:
            storage = tensors[output.of].untyped_storage()
            if storage.nbytes() != output.storage_bytes:
                return None  # FSDP has let go of it
            with torch._C._DisableTorchDispatch():  # noqa: SLF001
                tensor.set_(storage, output.offset, output.shape, output.stride)
        made.append(FakeTensor(tensors[0].fake_mode, tensor, output.device))
    return made[0] if is_one else tuple(made)


def _tensor(output: _Output) -> torch.Tensor:
    """One of that shape which no mode knows of, with a storage of its own."""
    with torch._C._DisableTorchDispatch():  # noqa: SLF001 - as FakeTensorMode does
        return torch.empty_strided(output.shape, output.stride, dtype=output.dtype, device="meta")


# Of these operators of FSDP's, the argument that holds gathered weights: as they come, and as they are used.
_GATHERED = {"fsdp::all_gather_copy_in": (1, "all_gather_output"), "fsdp::split_with_sizes_copy": (3, "out")}


@dataclass
class _Living:
    """A storage that lives, and what was recorded of it last."""

    storage: weakref.ref[Any]
    change: Change


class Counter(QuickMode):
    """Records storages by part: as operators make them, as they change their size, and as they are let go of."""

    def __init__(self, vocabulary_size: int, operators: OperatorCounter | None = None) -> None:
        """``operators`` counts beside it what is called, where anybody wants to know."""
        super().__init__()
        self.operators = operators
        self.part = "weights"
        self.vocabulary_size = vocabulary_size
        self._changes: list[Change] = []
        self._living: dict[int, _Living] = {}
        self._numbers = itertools.count()

    def take(self) -> list[Change]:
        """What happened since it was last asked."""
        changes, self._changes = self._changes, []
        return changes

    def count(self, tensor: torch.Tensor) -> None:
        """Count the storage of ``tensor`` unless it is counted; of a tensor in shards, this rank's."""
        storage = on_this_rank(tensor).untyped_storage()
        key = id(storage)
        if key in self._living:
            return

        def gone(_: object) -> None:
            if key in self._living:
                self._record(key, num_bytes=0)
                del self._living[key]

        new = Change(next(self._numbers), 0, self._part_of(tensor))
        self._living[key] = _Living(weakref.ref(storage, gone), new)
        self._record(key, num_bytes=storage.nbytes())

    def ignore(self, tensors: Iterable[torch.Tensor]) -> None:
        """Never count the storages of these."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._living[id(storage)] = _Living(weakref.ref(storage), Change(next(self._numbers), 0, "ignored"))

    def called(self, name: str) -> None:
        """``name`` was called where no dispatcher sees it."""
        if self.operators is not None:
            self.operators.called(name)

    def times(self, number: int) -> AbstractContextManager[None]:
        """What runs inside is run so often in a step."""
        return self.operators.times(number) if self.operators else nullcontext()

    def resizing(self) -> AbstractContextManager[None]:
        """See storages change their size: FSDP lets go of weights so, and no operator is called."""
        real = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, num_bytes: int) -> Any:
            answer = real(storage, num_bytes)
            if id(storage) in self._living:
                self._record(id(storage), num_bytes=num_bytes)
            return answer

        return replaced(torch.UntypedStorage, resize_=resize)

    def _record(self, key: int, **changed: Any) -> None:
        living = self._living[key]
        change = living.change._replace(**changed)
        if change != living.change:
            living.change = change
            self._changes.append(change)

    def _part_of(self, tensor: torch.Tensor) -> str:
        if self.part != "weights" and tensor.dim() > 1 and tensor.shape[-1] == self.vocabulary_size:
            return "logits"
        # What a backward pass makes in the shape of activations are gradients of activations.
        return "activations" if self.part == "gradients" and tensor.dim() > 2 else self.part  # noqa: PLR2004

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # two of three calls, which make nothing
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes back as what it does to this rank's shard
        kwargs = kwargs or {}
        made = known_output(function, args, kwargs)
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                self.count(tensor)
        if function.name() in _GATHERED:
            position, name = _GATHERED[function.name()]
            for tensor in tree_leaves(kwargs[name] if name in kwargs else args[position]):
                if id(tensor.untyped_storage()) in self._living:
                    self._record(id(tensor.untyped_storage()), part="gathered")
        return made


def on_this_rank(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, or this rank's shard of it."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():  # the shard itself, and not a view that autograd knows
        return tensor.to_local()
