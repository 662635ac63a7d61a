"""What operators gave on fake tensors, kept by what they were given: most layers of a step call what its first does.

A ``FakeTensorMode`` keeps answers too, but what it looks at to find one takes longer than most operators do on a GPU,
and was half of a prediction. Kept here are only answers that follow from the shapes of ordinary tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

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


class _Answer(NamedTuple):
    """What an operator gave; no ``None`` is among it where it ``is_one`` tensor."""

    outputs: Sequence[_Output | None]
    is_one: bool


class KnownOutputs:
    """Calls operators, or makes what they would give; to be asked within a dispatch mode, with a fake one below it."""

    # Of the whole process, as PyTorch's own: what one prediction has found serves the next.
    _answers: dict[tuple[object, ...], _Answer] = {}  # noqa: RUF012
    _is_kept: dict[Any, bool] = {}  # noqa: RUF012

    def call(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What ``function`` gives."""
        is_kept = self._is_kept.get(function)
        if is_kept is None:
            is_kept = self._is_kept[function] = _follows_from_shapes(function)
        if not is_kept:
            return function(*args, **kwargs)
        tensors: list[FakeTensor] = []
        key: list[object] = [function, torch.get_default_dtype()]
        if not (_add(key, tensors, args) and (not kwargs or _add_named(key, tensors, kwargs)) and tensors):
            return function(*args, **kwargs)
        whole_key = tuple(key)
        known = self._answers.get(whole_key)
        if known is not None:
            made = _made(known, tensors)
            if made is not None:
                return made
        answer = function(*args, **kwargs)
        if known is None:
            found = _described(answer, tensors)
            if found is not None:
                self._answers[whole_key] = found
        return answer


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


def _add_named(key: list[object], tensors: list[FakeTensor], values: Mapping[str, Any]) -> bool:
    key += values
    return _add(key, tensors, tuple(values.values()))


def _described(answer: Any, tensors: Sequence[FakeTensor]) -> _Answer | None:
    """What there is to know of an ``answer``; ``None``: it cannot be made from that."""
    is_one = not isinstance(answer, tuple)
    found = [(each, each if each is None else _output(each, tensors)) for each in ([answer] if is_one else answer)]
    is_whole = all(output is not None or (each is None and not is_one) for each, output in found)
    return _Answer([output for _, output in found], is_one) if is_whole else None


def _output(tensor: Any, tensors: Sequence[FakeTensor]) -> _Output | None:
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


def _made(answer: _Answer, tensors: Sequence[FakeTensor]) -> Any:
    """The tensors of an ``answer``; ``None``: not of these, whose storages have another size."""
    made: list[FakeTensor | None] = []
    for output in answer.outputs:
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
    return made[0] if answer.is_one else tuple(made)


def _tensor(output: _Output) -> torch.Tensor:
    """One of that shape which no mode knows of, with a storage of its own."""
    with torch._C._DisableTorchDispatch():  # noqa: SLF001 - as FakeTensorMode does
        return torch.empty_strided(output.shape, output.stride, dtype=output.dtype, device="meta")
