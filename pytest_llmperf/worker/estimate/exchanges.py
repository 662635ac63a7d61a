"""Exchanges: what a rank of so many sends and receives in a step, counted without the others, by kind and bytes; with
all that it runs, by operator.

FSDP runs its own code on a process group whose other ranks are not there. DDP's reducer takes no fake tensors: its own
function makes the buckets, in the order in which the backward pass has the gradients."""

from __future__ import annotations

import inspect
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
import transformers  # its Trainer takes a second, and is loaded where it is named
from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental._attention import _templated_ring_attention
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves

from pytest_llmperf.observe.places import exchange_name
from pytest_llmperf.settings.train_spec import TrainSpec
from pytest_llmperf.worker.estimate.arithmetic import READ, Arithmetic, replaced
from pytest_llmperf.worker.settings import parallelism


@contextmanager
def among_ranks(
    spec: TrainSpec, ranks_per_node: int = 0, counter: OperatorCounter | None = None
) -> Iterator[ParallelismConfig | None]:
    """Be rank 0 of the spec's ranks while this lasts, on one node where nobody says otherwise; before any fake mode: a
    mesh is made of numbers. Rank 0 holds as much as any: of too few rows the last ranks hold less. Of DDP's each is
    alone, but for its buckets."""
    if spec.parallelism == "ddp":
        yield None
        return
    config = ParallelismConfig(**parallelism.mesh_sizes(spec, ranks_per_node or spec.gpus))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=spec.gpus)
    ring = sys.modules[_templated_ring_attention.__module__]
    # Of a thousand chunks that it makes of each weight, twice, FSDP keeps this rank's: the first.
    only = {"_chunk_with_empty": _first_chunk} if hasattr(_fsdp_param, "_chunk_with_empty") else {}
    try:
        config.get_device_mesh("cpu")
        with replaced(ring, range=partial(_turns, counter or OperatorCounter())), replaced(_fsdp_param, **only):
            yield config
    finally:
        dist.destroy_process_group()


def _turns(counter: OperatorCounter, *bounds: int) -> Iterator[int]:
    """Of a ring's many turns the first three and the last; those between are as the third, which counts for them."""
    turns = range(*bounds)
    if len(bounds) > 1 or len(turns) <= _TURNS:
        yield from turns
        return
    yield from turns[: _TURNS - 2]
    with counter.repeated(len(turns) - _TURNS + 1):
        yield turns[_TURNS - 2]
    yield turns[-1]


# Of a ring: its own part's, one after it, one for all that are alike, and the last, which passes nothing on.
_TURNS = 4

#: Of what a model is to be given for a pass, the context that the pass needs, and what this rank's is given in it.
Divided: TypeAlias = Callable[[dict[str, torch.Tensor]], AbstractContextManager[dict[str, torch.Tensor]]]


def shard(spec: TrainSpec, model: Any, config: ParallelismConfig) -> Divided:
    """Divide ``model`` in place, as accelerate does on GPUs with the Trainer's arguments; how its input is."""
    if spec.parallelism == "tensor":
        parallelism.share_layers(spec, model, config.get_device_mesh())
        return nullcontext
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=parallelism.RESHARD_AFTER_FORWARD,
        auto_wrap_policy="transformer_based_wrap",
        cpu_ram_efficient_loading=False,
    )
    if spec.mixed_precision != "no":
        plugin.set_mixed_precision(spec.mixed_precision)
    # What it asks of an Accelerator; a real one would look for GPUs.
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin),
        torch_device_mesh=config.get_device_mesh(),
        parallelism_config=config,
        mixed_precision=spec.mixed_precision,
        is_main_process=False,
        device=torch.device("cpu"),
    )
    fsdp2_prepare_model(accelerator, model)
    if spec.parallelism != "context":
        return nullcontext
    Accelerator._prepare_cp(accelerator, model)  # noqa: SLF001 - by their own functions, as in a training
    accelerator.maybe_context_parallel = partial(Accelerator.maybe_context_parallel, accelerator)
    trainer = SimpleNamespace(accelerator=accelerator)

    @contextmanager
    def own_parts(given: dict[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
        whole = {name: tokens.clone() for name, tokens in given.items()}  # it is divided in place
        divided, own = transformers.Trainer._prepare_context_parallel_inputs(trainer, model, whole)  # noqa: SLF001
        with divided():
            yield own

    return own_parts


def _first_chunk(tensor: torch.Tensor, num_chunks: int, dim: int) -> list[torch.Tensor]:
    """What rank 0 gets of ``tensor``."""
    return [tensor.narrow(dim, 0, -(-tensor.size(dim) // num_chunks))]


def deepspeed() -> Any:
    """It, as one rank of those that are not there has it."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": "0"}
    return import_module("deepspeed")


@contextmanager
def deepspeed_on_fakes() -> Iterator[Callable[[TrainSpec, Any, Any], tuple[Any, int]]]:
    """What makes DeepSpeed's engine of a model and its optimizer, its questions answered as in ranks that are well."""
    package, zero = deepspeed(), partial(import_module, package="deepspeed.runtime.zero")
    flat, stage3, partitions = map(zero, (".stage_1_and_2", ".stage3", ".partition_parameters"))

    def halve(model: Any) -> Any:
        """In place, as it does with tensors that are not fake."""
        for each in (*model.parameters(), *model.buffers()):
            each.data = each.data.bfloat16() if each.is_floating_point() else each.data
        return model

    def initialize(spec: TrainSpec, model: Any, optimizer: Any) -> tuple[Any, int]:
        """The engine, and by how many bytes all ranks' shards are larger than the model."""
        size = sum(each.numel() for each in model.parameters())
        config = {
            **parallelism.zero_config(spec, model),
            "zero_allow_untested_optimizer": True,  # which accelerate adds
        }
        engine = package.initialize(model=model, optimizer=optimizer, config=config)[0]
        shards = spec.gpus * sum(each.numel() for each in parallelism.zero_masters(engine))
        return engine, (shards - size) * next(model.parameters()).element_size()

    answers: Mapping[Any, Mapping[str, Any]] = {
        torch.nn.Module: {"to": lambda module, *_, **__: module, "bfloat16": halve},
        import_module("deepspeed.comm.torch"): {"build_shm_op": lambda: None},  # it would be compiled
        import_module("deepspeed.comm.comm"): {"cdb": None},  # groups of an earlier prediction
        import_module("deepspeed.utils.groups"): {"_WORLD_GROUP": None},
        package.accelerator.get_accelerator(): {"available_memory": lambda *_: sys.maxsize},
        zero(".partitioned_param_coordinator"): {"assert_ints_same_as_other_ranks": lambda _: None},
        partitions: {"range": own},
        partitions.AllGatherCoalescedHandle: {"wait": gathered},
        stage3: {"reduce_scatter_coalesced": scattered, "is_invalid_grad_norm": lambda _: False},
        # The latter makes a view for each rank's part of each gradient, of which this rank takes its own.
        flat: {"is_invalid_grad_norm": lambda _: False, "_unflatten_dense_tensors": lambda _, its: its},
    }
    with ExitStack() as stack:
        for where, values in answers.items():
            stack.enter_context(replaced(where, **values))
        yield initialize


def own(*bounds: int) -> range:
    """Of a view for each rank, this rank's."""
    return range(*bounds)[:1]


def gathered(handle: Any, **_: Any) -> None:
    """Each weight is put together, of one view of what was gathered: DeepSpeed has one for each rank."""
    if not handle.complete:
        handle.allgather_handle.wait()
        for weight in handle.params:
            whole = handle.partitions[0].as_strided((weight.ds_numel,), (1,))
            weight.data = torch.cat([whole]).view(weight.ds_shape).to(weight.ds_tensor.dtype)
            weight.ds_status = type(weight.ds_status).AVAILABLE
        handle.complete = True


@torch.no_grad()
def scattered(tensors: list[torch.Tensor], group: Any = None) -> list[torch.Tensor]:
    """Rank 0's parts of gradients that are summed; DeepSpeed has a view for each rank, twice."""
    ranks = dist.get_world_size(group)
    sizes = [-(-each.numel() // ranks) for each in tensors]
    whole, missing = tensors[0].view(-1), ranks * sum(sizes) - sum(each.numel() for each in tensors)
    if len(tensors) > 1 or missing:
        whole = torch.cat([*(each.view(-1) for each in tensors), whole.new_empty(missing)])
    own = whole.div_(ranks).narrow(0, 0, sum(sizes))
    dist.reduce_scatter_tensor(own, whole, group=group)
    return [*own.split(sizes)]


class Exchanges:
    def __init__(self) -> None:
        self.found: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
        """By kind and dimension of the mesh: how many, their bytes, and further bytes for each rank that there is."""
        self.times = 1
        """How often what is seen now is done in a step."""
        self.reduces_at_the_end = True
        """Of accumulated gradients all but the last pass reduce nothing; DeepSpeed's stages share each pass's."""

    def saw(self, function: Any, args: Any) -> None:
        """An operator of ``c10d`` was called: its bytes are the whole's, as ``observe/places.py`` counts them."""
        kind = function.name().partition("::")[2].partition(".")[0]
        if kind == "wait_tensor":
            return
        named = [each for each in args if isinstance(each, str)]
        boxed = [each for each in args if isinstance(each, torch.ScriptObject)]
        find = dist.distributed_c10d._resolve_process_group  # noqa: SLF001 - functional operators have a name alone
        group = dist.ProcessGroup.unbox(boxed[0]) if boxed else find(named[-1])
        sizes = [sum(leaf.nbytes for leaf in tree_leaves(each) if isinstance(leaf, torch.Tensor)) for each in args]
        # What layers share is in each pass.
        times = 1 if "reduce" in kind and boxed and self.reduces_at_the_end else self.times
        # Behind functional ones are those of several tensors, as which PyTorch records them.
        kind = kind if boxed or not kind.endswith("_tensor") else f"{kind}_coalesced"
        self.add(exchange_name(kind, group.group_desc), max(sizes), times=times)

    def add(self, name: str, whole: int, each: int = 0, times: int = 1) -> None:
        for at, amount in enumerate((1, whole, each)):
            self.found[name][at] += times * amount

    def add_ddp(self, model: Any, gradients: list[torch.nn.Parameter]) -> None:
        """Of its forward pass the buffers, of its backward pass the ``gradients``, in the order in which they come."""
        first, most = dist._DEFAULT_FIRST_BUCKET_BYTES, 25 * 2**20  # noqa: SLF001 - DDP takes it from there
        for kind, tensors, limits in (
            ("broadcast", [*model.buffers()], [250 * 2**20]),
            ("all_reduce", gradients, [first, most]),
        ):
            buckets, _ = dist._compute_bucket_assignment_by_size(tensors, limits) if tensors else ([], [])  # noqa: SLF001
            for bucket in buckets:
                self.add(kind, sum(tensors[index].nbytes for index in bucket))

    def add_trainer(self, model: Any) -> None:
        """Of the Trainer: a step's tokens, which it adds up where a model's loss can be told their number."""
        parameters = inspect.signature(model.forward).parameters.values()
        if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters):
            self.add("all_gather", 0, torch.long.itemsize)


# What asks for a tensor's kind, and makes none: how often depends on who looks.
_QUESTIONS = frozenset(f"aten::{name}" for name in READ["questions"]["aten"].split())


class OperatorCounter:
    """Counts while one of its ``times`` is open."""

    def __init__(self) -> None:
        self.operators: Counter[str] = Counter()
        """Without the names of their overloads, ``aten::mm`` say; Liger's kernels as ``liger::…``."""
        self.flops: Counter[str] = Counter()
        """By operator."""
        self.exchanges = Exchanges()
        self.padding = 0
        """Bytes that the shards of all ranks have beyond the model."""
        self._now, self._flops = Counter[str](), Counter[str]()

    def called(self, name: str) -> None:
        """``name`` was called where no dispatcher sees it."""
        self._now[name] += 1

    def add_rest(self, model: Any, counter: AbstractContextManager[Any], gradients: list[torch.nn.Parameter]) -> None:
        """What ranks exchange beside what the step has asked for, which ``counter`` sees; ``gradients`` of DDP, in the
        order in which they came."""
        self.exchanges.add_trainer(model)
        if gradients:
            self.exchanges.add_ddp(model, gradients)
            return
        if not hasattr(model, "set_requires_gradient_sync"):
            # The Trainer adds up the squares of a tensor's norms itself.
            self.exchanges.add("all_reduce", torch.float32.itemsize)
            return
        # Rows are dealt out whole, and each rank gets as many.
        sharded = [parameter for parameter in model.parameters() if isinstance(parameter, DTensor)]
        shards = ((each, each.device_mesh.size(-1) * each._local_tensor.nbytes) for each in sharded)  # noqa: SLF001
        self.padding = sum(num_bytes - each.numel() * each.element_size() for each, num_bytes in shards)
        with counter:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    @contextmanager
    def times(self, number: int) -> Iterator[None]:
        """What runs inside is run so often in a step."""
        counts, flops = self._now, self._flops = Counter[str](), Counter[str]()
        self.exchanges.times = number

        def seen(name: str) -> None:
            if name not in _QUESTIONS and not name.startswith(("prim::", "profiler::")):
                counts[name] += 1

        with Arithmetic(seen) as arithmetic:
            arithmetic.by_operator = flops
            yield
        self._now = Counter()  # of which nobody asks
        for total, found in ((self.operators, counts), (self.flops, flops)):
            total.update({name: count * number for name, count in found.items()})

    @contextmanager
    def repeated(self, number: int) -> Iterator[None]:
        """What runs inside is so often done, and runs once."""
        found = self._now, self._flops
        before = [each.copy() for each in found]
        with replaced(self.exchanges, times=self.exchanges.times * number):
            yield
        for each, was in zip(found, before, strict=True):
            each.update({name: (number - 1) * (count - was[name]) for name, count in each.items()})
