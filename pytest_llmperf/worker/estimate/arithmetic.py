"""Arithmetic of a training step, counted where its operators run, on fake tensors as on real ones; and its exchanges.

FLOPs are counted as the PaLM paper does (Chowdhery et al. 2022, appendix B), by operator instead of by formula:

- Products of matrices alone count, at 2 FLOPs for a multiplication and its addition. A batched product over an inner
  size of 1 (rotary embedding's angles) adds nothing up, and is elementwise.
- Attention is its two products over the full square of scores; no mask takes anything off.
- The backward pass of an operator is two products for each of its forward pass. The scores that fused attention
  computes again are none of the model's: whichever kernel runs, the number is the same.

A layer that checkpointing computes again is counted twice: a count is of the step that ran."""

from __future__ import annotations

import inspect
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache, partial
from importlib import import_module
from inspect import getattr_static
from math import prod
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
import transformers  # its Trainer takes a second, and is loaded where it is named
from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.experimental._attention import _templated_ring_attention
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

from pytest_llmperf.observe.places import exchange_name
from pytest_llmperf.settings.train_spec import TrainSpec
from pytest_llmperf.support.files import shipped
from pytest_llmperf.worker.build import hf_config_of
from pytest_llmperf.worker.settings.attention import attentions_of
from pytest_llmperf.worker.settings.parallelism import (
    RESHARD_AFTER_FORWARD,
    mesh_sizes,
    share_layers,
    zero_config,
    zero_masters,
)

# What each operator computes, by its arguments.

_Arguments = Mapping[str, Any]

# What an operator returned, beside its arguments.
ANSWER = " answer"


def _matrices(given: _Arguments, first: str, second: str) -> int:
    """Of two matrices, or of a matrix and a vector."""
    return 2 * int(given[first].numel()) * prod(given[second].shape[1:])


def _batched(given: _Arguments, first: str, second: str) -> int:
    _, inner, columns = given[second].shape
    return 2 * int(given[first].numel()) * int(columns) if inner > 1 else 0


def _grouped(given: _Arguments, first: str, second: str) -> int:
    """As if with one matrix, since every row is in one group; two flat ones share what is summed over."""
    one, other = given[first], given[second]
    groups_of_columns = int(one.shape[0]) if one.dim() > other.dim() else 1
    return 2 * int(one.numel()) * int(other.shape[-1]) // groups_of_columns


def _convolved(given: _Arguments, place: str = ANSWER) -> int:
    places = given["input"] if given.get("transposed") else given[place]
    return 2 * int(places.numel()) * prod(given["weight"].shape[1:]) * sum(given.get("output_mask", (1,))[:2])


def _attention(given: _Arguments, sequence: int, products: int) -> int:
    """So often attention's two products; ``sequence``: the dimension that a sequence's tokens are in."""
    query, key, value = (_known(given, names) for names in (("query", "q"), ("key", "k"), ("value", "v")))
    sizes = int(query.shape[-1]) + int(value.shape[-1])
    rows, others = int(query.numel()) // int(query.shape[-1]), int(key.shape[sequence])
    # Where sequences of several lengths follow each other, where each ends.
    queries, keys = (_known(given, (f"cu_seqlens_{one}", f"cum_seq_{one}")) for one in ("q", "k"))
    if queries is None or keys is None:
        return products * 2 * rows * others * sizes
    if isinstance(keys, FakeTensor) or keys.device.type == "meta":  # any may be the longest
        return products * 2 * rows * int(_known(given, ("max_seqlen_k", "max_k"))) * sizes
    pairs = int((queries.diff() * keys.diff()).sum().item())
    return products * 2 * pairs * int(query.shape[-2]) * sizes


def _known(given: _Arguments, names: Iterable[str]) -> Any:
    """The argument under whichever of ``names`` an operator has it; ``None``: it was not given."""
    return next((given[name] for name in names if given.get(name) is not None), None)


_FORWARD, _BACKWARD = 1, 2
_HEADS_FIRST, _TOKENS_FIRST = -2, -3

#: Names of operators and functions, as PyTorch has them.
READ = shipped(__file__, "functions.ini")
_FACTORS = {"matrices": _matrices, "batched": _batched, "grouped": _grouped}
_PRODUCTS: Mapping[str, Callable[[_Arguments], int]] = {
    name: partial(own, first=factors.split()[0], second=factors.split()[1])
    for kind, own in _FACTORS.items()
    for factors, names in READ[kind].items()
    for name in names.split()
} | {
    "transformers::grouped_mm_fallback_backward": lambda given: _BACKWARD * _grouped(given, "input", "weight"),
    "aten::convolution": _convolved,
    "aten::convolution_overrideable": _convolved,
    "aten::convolution_backward": partial(_convolved, place="grad_output"),
}


@cache
def formula(function: OpOverload) -> Callable[[_Arguments], int] | None:
    """What ``function`` counts; ``None``: nothing."""
    name = function.name().partition(".")[0]
    if name in _PRODUCTS:
        return _PRODUCTS[name]
    namespace, _, own = name.partition("::")
    backward = "backward" in own or "bwd" in own
    products = _BACKWARD if backward else _FORWARD
    # The CPU's, CUDA's three kinds, and those of devices that bring their own.
    if namespace == "aten" and own.startswith("_scaled_dot_product_") and "_math" not in own:
        return partial(_attention, sequence=_HEADS_FIRST, products=products)
    # PyTorch's own kernels, flash-attn of every number, and what the hub builds of it under a name with a hash.
    is_kernel = "flash_attn" in namespace or own.startswith(("_flash_attention_", "_efficient_attention_"))
    if is_kernel and (backward or "forward" in own or "fwd" in own):
        return partial(_attention, sequence=_TOKENS_FIRST, products=products)
    return None


# Functions that are no operators: their kernels are Triton's, or run products in pieces of the tokens.


def _fused_linear_cross_entropy(context: Any, hidden: Any, weight: Any, *_: Any, **__: Any) -> int:
    """The vocabulary's product, and in the same call its gradients: those of what asks for one."""
    return 2 * int(hidden.numel()) * int(weight.shape[0]) * (1 + sum(context.needs_input_grad[:2]))


def _fused_experts(context: Any, _tokens: Any, gate_up: Any, down: Any, chosen: Any, *_: Any) -> int:
    """Each token by the matrices of the experts that were chosen for it; its backward pass is counted with it."""
    weights = prod(gate_up.shape[1:]) + prod(down.shape[1:])
    return 2 * int(chosen.numel()) * weights * (1 + _BACKWARD * any(context.needs_input_grad))


def _fused_feed_forward(context: Any, tokens: Any, *weights_and_factors: Any) -> int:
    weights = sum(int(weight.numel()) for weight in weights_and_factors[:3])
    rows = int(tokens.numel()) // int(tokens.shape[-1])
    return 2 * rows * weights * (1 + _BACKWARD * any(context.needs_input_grad))


_FUSED: Mapping[str, Callable[..., int]] = {
    "liger_kernel.ops.fused_linear_cross_entropy LigerFusedLinearCrossEntropyFunction": _fused_linear_cross_entropy,
    "liger_kernel.ops.fused_moe LigerFusedMoEFunction": _fused_experts,
    "liger_kernel.ops.mlp LigerMLPFunction": _fused_feed_forward,
}

#: Asked of each fake tensor that C++ looks at: two of three calls.
DEVICE = torch.ops.prim.device.default


class QuickMode(TorchDispatchMode):
    """A dispatch mode without the wrapper that keeps a compiler out of ``__torch_dispatch__``."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


@contextmanager
def replaced(where: Any, **values: Any) -> Iterator[None]:
    """Let the attributes of ``where`` have these ``values`` while this lasts; a module's new one hides a builtin."""
    real = {name: getattr_static(where, name) for name in values if name in dir(where)}
    try:
        for name, value in values.items():
            setattr(where, name, value)
        yield
    finally:
        for name in values:
            setattr(where, name, real[name]) if name in real else delattr(where, name)


class Arithmetic(QuickMode):
    """Counts the FLOPs of what runs under it, by operator: ``with Arithmetic() as arithmetic: step()``. It sees each
    one below autograd, the backward pass's too; of a tensor in shards, this rank's products. ``called`` gets names."""

    supports_higher_order_operators = True

    def __init__(self, called: Callable[[str], None] = lambda _: None) -> None:
        super().__init__()
        self._called = called
        self.by_operator: dict[str, int] = defaultdict(int)
        """By an operator's name, ``aten::mm`` say."""
        self._is_silent = False
        self._patches = ExitStack()

    @property
    def flops(self) -> int:
        return sum(self.by_operator.values())

    def add(self, name: str, flops: int) -> None:
        """Count ``flops``, unless they are a part of what is counted as a whole."""
        if flops and not self._is_silent:
            self.by_operator[name] += flops

    @contextmanager
    def whole(self, name: str, flops: int) -> Iterator[None]:
        """Count ``flops`` for all that happens inside, and none of its parts."""
        self.add(name, flops)
        with replaced(self, _is_silent=True):
            yield

    def __enter__(self) -> Arithmetic:  # noqa: PYI034 - Self is newer than the oldest Python here
        for names, flops in _FUSED.items():
            module, function = names.split()
            if module in sys.modules:  # else nobody can call it
                self._patches.enter_context(_counted(self, getattr(sys.modules[module], function), flops))
        told = ShardingPropagator._propagate_tensor_meta_non_cached  # noqa: SLF001 - it has no other

        def unheard(*given: Any) -> Any:
            """The shape of what all ranks have together is found by the operator itself: that is no rank's work."""
            with self.whole("", 0):
                return told(*given)

        self._patches.enter_context(replaced(ShardingPropagator, _propagate_tensor_meta_non_cached=unheard))
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._patches.close()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # two of three calls, and nothing that a device does
        kwargs = kwargs or {}
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes back as what it does to this rank's shard
        if isinstance(function, HigherOrderOperator):
            self._called(function.name())
            products = {"flex_attention": _FORWARD, "flex_attention_backward": _BACKWARD}.get(function.name())
            if products:
                given = dict(zip(("query", "key", "value"), args, strict=False))
                self.add(function.name(), _attention(given, _HEADS_FIRST, products))
            return function(*args, **kwargs)
        flops, name = formula(function), function.name().partition(".")[0]
        answer = function(*args, **kwargs)
        self._called(name)
        if flops is not None:
            names = (argument.name for argument in function._schema.arguments)  # noqa: SLF001 - it has no other
            given = dict(zip(names, args, strict=False)) | kwargs
            self.add(name, flops({**given, ANSWER: answer}))
        return answer


# Exchanges: what a rank of so many sends and receives in a step, counted without the others, by kind and bytes. FSDP
# runs its own code on a process group whose other ranks are not there. DDP's reducer takes no fake tensors: its own
# function makes the buckets, in the order in which the backward pass has the gradients.


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
    config = ParallelismConfig(**mesh_sizes(spec, ranks_per_node or spec.gpus))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=spec.gpus)
    ring = sys.modules[_templated_ring_attention.__module__]
    try:
        config.get_device_mesh("cpu")
        with replaced(ring, range=partial(_turns, counter or OperatorCounter())):
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
        share_layers(spec, model, config.get_device_mesh())
        return nullcontext
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=RESHARD_AFTER_FORWARD,
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


def first_chunk(tensor: torch.Tensor, num_chunks: int, dim: int) -> list[torch.Tensor]:
    """What rank 0 gets of ``tensor``."""
    return [tensor.narrow(dim, 0, -(-tensor.size(dim) // num_chunks))]


def padding_bytes(model: Any) -> int:
    """What the shards of all ranks have beyond the model: rows are dealt out whole, and each rank gets as many."""
    sharded = [parameter for parameter in model.parameters() if isinstance(parameter, DTensor)]
    shards = ((each, each.device_mesh.size(-1) * each._local_tensor.nbytes) for each in sharded)  # noqa: SLF001
    return sum(num_bytes - each.numel() * each.element_size() for each, num_bytes in shards)


def deepspeed() -> Any:
    """It, as one rank of those that are not there has it."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": "0"}
    return import_module("deepspeed")


@contextmanager
def deepspeed_on_fake_tensors() -> Iterator[Callable[[TrainSpec, Any, Any], tuple[Any, int]]]:
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
        config = {**zero_config(spec, model), "zero_allow_untested_optimizer": True}  # which accelerate adds
        engine = package.initialize(model=model, optimizer=optimizer, config=config)[0]
        shards = spec.gpus * sum(each.numel() for each in zero_masters(engine))
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


def model_flops(config: Mapping[str, Any], sequence_length: int) -> float:
    """FLOPs of training for one token of a full sequence, of the model that ``config`` describes in its plain form.
    Those of one forward and one backward pass, nothing computed twice and nothing fused. Not in a process where Liger
    was ever applied: it patches classes for good. RefusedError, or whatever the model's code raises without content."""
    hf_config = hf_config_of(config)
    attention = "sdpa" if "sdpa" in attentions_of(MODEL_FOR_CAUSAL_LM_MAPPING[type(hf_config)]) else "eager"
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = AutoModelForCausalLM.from_config(hf_config, dtype=torch.bfloat16, attn_implementation=attention)
        model.eval()  # a layer that is left out at random asks for the content of a tensor
        ids = torch.zeros(1, sequence_length, dtype=torch.long)
        with Arithmetic() as arithmetic:
            model(input_ids=ids).logits.sum().backward()
    if not arithmetic.flops:
        raise ValueError(f"{hf_config.model_type}: not one product of matrices in a training step")
    return arithmetic.flops / sequence_length


def _counted(arithmetic: Arithmetic, function: Any, flops: Callable[..., int]) -> AbstractContextManager[None]:
    """``function`` of autograd is counted by its arguments, and what it calls is not."""
    forward, backward = function.forward, function.backward

    def counted_forward(context: Any, *args: Any, **kwargs: Any) -> Any:
        with arithmetic.whole(function.__name__, flops(context, *args, **kwargs)):
            return forward(context, *args, **kwargs)

    def quiet_backward(context: Any, *gradients: Any) -> Any:
        with arithmetic.whole(function.__name__, 0):
            return backward(context, *gradients)

    return replaced(function, forward=staticmethod(counted_forward), backward=staticmethod(quiet_backward))
