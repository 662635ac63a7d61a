"""Trainings by frameworks that nobody wrote for us, watched by the real hooks; each where its package is installed."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.worker.scripts import Scripts, Seen

pytestmark = [pytest.mark.torchrun, pytest.mark.wide]

STEPS = 12

NEEDED = {
    **dict.fromkeys(("trainer", "accelerated"), "accelerate"),
    **dict.fromkeys(("sft_padded", "sft_packed", "sft_padding_free", "dpo"), "trl"),
    "lora": "peft",
    **dict.fromkeys(("lightning", "lightning_accumulating"), "lightning"),
    **dict.fromkeys(("zero1", "zero2", "zero3"), "deepspeed"),
    "titan": "torchtitan",
}
# Some ask for them.
ONE_RANK = {"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Seen]:
    """Those that can run here, in forks of one process that has imported what they share."""
    there = {name: package for name, package in NEEDED.items() if find_spec(package)}
    # torchtitan looks for its device when it is imported.
    imports = ["transformers", *(package for package in dict.fromkeys(there.values()) if package != "torchtitan")]
    folder = tmp_path_factory.mktemp("frameworks")
    scripts = Scripts(folder, "frameworks.py", imports)
    # DeepSpeed compiles some of itself, and waits for ever for one that was killed while it did.
    alone = {**ONE_RANK, "TORCH_EXTENSIONS_DIR": str(folder / "extensions")}
    found = {
        name: scripts.add(name, alone if package in ("deepspeed", "torchtitan") else {})
        for name, package in there.items()
    }
    scripts.run()
    return found


@pytest.mark.parametrize("name", NEEDED)
def test_steps_losses_and_tokens_are_those_of_the_framework(seen: dict[str, Seen], name: str) -> None:
    if name not in seen:
        pytest.skip(f"{NEEDED[name]} is not installed")
    it = seen[name]
    own, share = it.own[:STEPS], it.share
    assert len(share.trained.record.step_seconds) == STEPS
    # Their own clocks are callbacks, some way behind the hook; which steps they are their losses and tokens say.
    assert it.seconds_apart < max(0.1 * it.usual_seconds, 0.004)
    assert share.trained.losses == pytest.approx(
        [loss for _, loss, _ in own], abs=1e-3 if name.startswith("zero") else 1e-5
    )
    tokens = share.trained.record.step_tokens or (share.trained.record.tokens_per_step,) * STEPS
    assert list(tokens[1:]) == [tokens for *_, tokens in own[1:]]
    assert share.trained.parameters > 20_000
    assert share.trace.steps == 3, share.trace.none
    assert "remarks" not in share.trained.evidence
