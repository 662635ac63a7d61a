"""Refusal: what transformers would not train as it was asked for, or would train as something else, in one line.

By what the model's class and configuration say of themselves; nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

# Of what a configuration says, the values under which every token sees those that follow it, and what to write instead.
_SEES_AHEAD: tuple[tuple[str, tuple[object, ...], str], ...] = (
    ("is_decoder", (False,), "true"),  # bert, roberta, electra, …
    ("causal", (False,), "true"),  # xlm
    ("attn_type", ("bi",), '"uni"'),  # xlnet
    ("use_bidirectional_attention", (True, "all"), "false"),  # gemma's embedding models
)
# Their configuration has the field, and their code does not look at it.
_CAUSAL_ANYWAY = frozenset({"gpt_neox", "gpt_neox_japanese"})
# A prefix that is seen by all: no setting makes it a plain causal model.
_NEVER_CAUSAL = frozenset({"cpmant"})


_LONGEST_REASON = 300


class RefusedError(ValueError):
    """A model that cannot be trained as it was asked for: one line with what to write instead."""


def unknown_type(model_type: str) -> RefusedError:
    """For a model type that the installed transformers does not have."""
    return RefusedError(
        f"{transformers_version()} has no model type {model_type!r}, and code that comes with a model is never run; "
        "expected a type that it has"
    )


def no_language_model(model_type: str) -> RefusedError:
    """For a model type that is no causal language model."""
    return RefusedError(
        f"{transformers_version()} has no causal language model of type {model_type!r}; expected one, e.g. a llama"
    )


@contextmanager
def of_what_cannot_be_built(model_type: str) -> Iterator[None]:
    """In here transformers builds a configuration or a model of it; what it does not take is the configuration's fault.

    Raises:
        RefusedError: it does not take it.
    """
    try:
        yield
    except (MemoryError, RuntimeError):  # a lack of memory, or of a device
        raise
    except Exception as error:
        why = " ".join(str(error).split()) or type(error).__name__
        raise RefusedError(
            f"{transformers_version()} cannot build {model_type} from this configuration: {why[:_LONGEST_REASON]}"
        ) from error


def unused(model_type: str, without_gradient: Sequence[str], parameters: int) -> RefusedError:
    """For a model of which rows of tokens train only a part; ``without_gradient``: the names of the rest."""
    return RefusedError(
        f"{model_type}: {len(without_gradient)} of {parameters} weights get no gradient from text (first: "
        f"{without_gradient[0]}); expected a causal language model that uses all of them, without parts for other input"
    )


def unmixed(model_type: str, types: Sequence[str]) -> RefusedError:
    """For a model that keeps weights of several ``types`` and has no code that converts between them."""
    return RefusedError(
        f"{model_type} keeps weights in {' and '.join(types)}, and its code does not convert between them; "
        "use mixed_precision='bf16'"
    )


def check_direction(hf_config: Any) -> None:
    """Whether a model of this configuration is causal; of one that was built, since some classes set what makes it so.

    Raises:
        RefusedError: it is not.
    """
    name = hf_config.model_type
    if name in _NEVER_CAUSAL:
        raise RefusedError(
            f"{name} is no causal model, its tokens see those after them; expected a causal language model"
        )
    for key, values, instead in _SEES_AHEAD:
        value = getattr(hf_config, key, None)
        if value in values and name not in _CAUSAL_ANYWAY:
            raise RefusedError(
                f"{name} with {key}={value} is no causal model, its tokens see those after them; expected a causal "
                f'one: write "{key}": {instead} into its configuration'
            )


def transformers_version() -> str:
    """As a message names it."""
    return f"transformers {version('transformers')}"
