"""Creep in a run: it passes, fails a strict one, and is recorded with a reason alone."""

from __future__ import annotations

from tests.plugin.conftest import Project

ONE = "def test_one(perf, train_spec):\n    perf.check(train_spec)\n"


def test_memory_that_grew_by_small_steps_needs_a_reason(project: Project) -> None:
    project.pytester.makeini("[pytest]\nperf_memory_tolerance = 0.01\n")
    project.pytester.makepyfile(test_mine=ONE)
    project.record(reserved_bytes=10**9)
    stored = project.baselines[0].read_text()
    project.fake(reserved_bytes=1_009_000_000)
    assert project.run("--update-baselines").ret == 0
    crept = "*creep: peak_reserved_bytes 971.8 MiB is +1.9 % from the best accepted since the last reason, *"
    project.fake(reserved_bytes=1_019_000_000)
    assert project.run().ret == 0
    for option in ("--perf-strict", "--update-baselines"):
        result = project.run(option)
        result.assert_outcomes(failed=1)
        result.stdout.fnmatch_lines([crept])
    assert project.run("--update-baselines", "--perf-reason", "more buffers").ret == 0
    assert project.run("--perf-strict").ret == 0
    assert '"replaces"' not in stored + project.baselines[0].read_text()
