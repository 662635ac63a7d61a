"""What the command no longer has: one line says what to use instead."""

from __future__ import annotations

import pytest

from pytest_llmperf.cli import main


@pytest.mark.parametrize(
    ("command", "instead"),
    [
        ("report --purpose=cheapest --tokens 10B", "'report --purpose' was removed: `llmperf report --tables` has"),
        ("report --losses a.json --at 10", "'report --losses' was removed: --perf-json has the loss of each step"),
        ("report --tables --samples 9", "'report --samples' was removed: an epoch is"),
        ("export a.json --format=tensorboard", "'export --format tensorboard' was removed: read --perf-json"),
        ("export --format bencher a.json", "'export --format bencher' was removed: this tracker reads"),
        ("baselines merge O A B", "'baselines merge' was removed: take one side"),
        ("predict llama-tiny --gpus 16", "'predict' was removed: measure the width instead"),
    ],
)
def test_what_is_gone_names_what_to_use_instead(command: str, instead: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(command.split())
    assert ended.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"llmperf: error: {instead}")


def test_a_word_of_another_command_is_not_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "predict"]) == 1
    assert "was removed" not in capsys.readouterr().err
