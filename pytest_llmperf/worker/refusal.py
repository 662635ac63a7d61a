"""Refusal: what transformers would not train as it was asked for, or would train as something else, in one line.

By what the model's class and configuration say of themselves; nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Iterator
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
    return f"transformers {version('transformers')}"
