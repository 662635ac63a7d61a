"""Which layers ranks share, by a model's own plan."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pytest_llmperf import TrainSpec

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from pytest_llmperf.records.ranks import RefusedError  # noqa: E402 - they need torch
from pytest_llmperf.worker.settings import parallelism  # noqa: E402

SPEC = TrainSpec(model="llama-tiny", gpus=2, parallelism="tensor", mixed_precision="no")


def test_an_embedding_that_a_plan_divides_stays_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers 5.17 adds it to every plan; tied to the last product it would lose its weights."""
    divided: dict[str, object] = {}
    monkeypatch.setattr(parallelism, "init_device_mesh", lambda *_, **__: None)
    monkeypatch.setattr(parallelism, "parallelize_module", lambda _model, _mesh, styles: divided.update(styles))
    plan = {"embed_tokens": "embedding_rowwise", "layers.*.mlp.down_proj": "rowwise"}
    config = SimpleNamespace(base_model_tp_plan=plan, model_type="llama")
    model = SimpleNamespace(config=config, device=torch.device("cpu"), base_model_prefix="model")
    parallelism.share_layers(SPEC, model)
    assert [*divided] == ["model.layers.*.mlp.down_proj"]
    plan["embed_tokens"] = "colwise_rep"
    with pytest.raises(RefusedError, match="has in its plan colwise_rep for tensor parallelism"):
        parallelism.share_layers(SPEC, model)
