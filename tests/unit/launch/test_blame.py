"""Which node broke a launch, from what a real srun printed when one did."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_llmperf.launch.slurm import step_outcome

GIVEN_UP = """\
srun: cluster configuration lacks support for cpu binding
srun: error: Node failure on n2
srun: error: n1: task 0: Killed
srun: Force Terminated StepId=25.1
"""
AGENT_KILLED = """\
srun: error: n2: task 1: Killed
srun: First task exited 60s ago
srun: StepId=56.1 task 0: running
srun: StepId=56.1 task 1: exited abnormally
srun: launch/slurm: _step_signal: Terminating StepId=56.1
srun: Job step aborted: Waiting up to 22 seconds for job step to finish.
slurmstepd-n1: error: *** STEP 56.1 ON n1 CANCELLED AT 2026-11-21T20:31:58 ***
srun: error: n1: task 0: Killed
"""
NOT_STARTED = """\
srun: error: Task launch for StepId=9.1 failed on node n2: Communication connection failure
srun: error: Application launch failed: Communication connection failure
srun: Job step aborted: Waiting up to 22 seconds for job step to finish.
srun: error: n1: task 0: Killed
"""
NODES = ("n1", "n2")


@pytest.mark.parametrize(
    ("silent", "states", "log", "expected"),
    [
        (["n1"], {"n1": "mixed", "n2": "down+not_responding"}, GIVEN_UP, ["n2"]),
        (["n1"], {"n1": "mixed", "n2": "mixed"}, GIVEN_UP, ["n2"]),
        (["n1"], {"n1": "mixed", "n2": "down*"}, "", ["n2"]),
        ([], {}, "srun: error: Node failure on n[1-2]", ["n1", "n2"]),
        (["n1", "n2"], {"n1": "mixed", "n2": "mixed"}, AGENT_KILLED, ["n2"]),
        (["n1", "n2"], {"n1": "mixed", "n2": "mixed"}, NOT_STARTED, ["n2"]),
        (["n1", "n2"], {"n1": "mixed", "n2": "mixed+drain"}, "", ["n2"]),
        (["n1"], {"n1": "mixed", "n2": "mixed+drain"}, "", ["n1"]),
        (["n1", "n2"], {}, "", ["n1", "n2"]),
    ],
    ids=[
        "given up, though it left its last word",
        "SLURM calls it well again",
        "srun's log is lost",
        "two at once",
        "srun ended the other after its wait",
        "one that never took the step",
        "drained and silent",
        "an administrator drains one that works",
        "nobody says anything",
    ],
)
def test_the_node_that_broke_is_blamed_and_not_one_that_was_ended_for_it(
    silent: list[str], states: dict[str, str], log: str, expected: list[str]
) -> None:
    assert step_outcome.broken(NODES, silent, states, log) == expected


@given(silent=st.sets(st.sampled_from(NODES), min_size=1), log=st.text(), state=st.text())
def test_whatever_srun_prints_somebody_is_blamed_whom_the_launch_had(silent: set[str], log: str, state: str) -> None:
    found = step_outcome.broken(NODES, silent, dict.fromkeys(NODES, state), f"srun: error: {log}\n{log}")
    assert found
    assert {*found} <= {*NODES}


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("srun: unrecognized option '--bogus'\nTry \"srun --help\" for more information\n", "'--bogus'"),
        ("slurmstepd-n2: error: execve(): no\nsrun: error: n2: task 0: Exited with exit code 2\n\n", "execve(): no"),
        ("srun: error: n2: task 0: Exited with exit code 2", "exit code 2"),
        ("", ""),
    ],
)
def test_sruns_last_word_is_the_one_that_gives_a_reason(said: str, expected: str) -> None:
    assert step_outcome.word(said.splitlines()).endswith(expected)
