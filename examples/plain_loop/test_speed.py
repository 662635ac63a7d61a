import pytest


@pytest.mark.parametrize("batch", [8, 16])
def test_speed(perf, batch):
    perf.script(f"python train.py --batch {batch}", cwd="examples/plain_loop")
