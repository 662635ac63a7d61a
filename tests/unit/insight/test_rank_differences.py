"""Which rank stands apart in traced steps, and for which one the others wait."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_llmperf.analysis.step_difference import last_rank, odd_ranks, points_to, step_difference
from pytest_llmperf.records.trace import Trace, TraceRow, merged
from pytest_llmperf.support import codec
from tests.golden import Golden


def rank(exchange: float = 0.02, **more: float) -> Trace:
    """One rank's step of 480 ms: two kernels, an exchange, and ``more``."""
    rows = [
        TraceRow("kernel", "nvjet_hsh", 10.0, 0.3),
        TraceRow("kernel", "_swiglu_forward_kernel", 4.0, 0.1),
        TraceRow("collective", "ncclDevKernel_AllReduce", 2.0, exchange),
        *(TraceRow("kernel", name, count, 0.001 * count) for name, count in more.items()),
    ]
    return Trace(rows=tuple(sorted(rows)), steps=3, step_seconds=0.48, busy_seconds=0.47)


SOUND = merged([rank(), rank(0.021)])


def test_ranks_that_do_the_same_are_not_told() -> None:
    assert odd_ranks(SOUND, SOUND) == ()
    assert last_rank(SOUND, SOUND) == ""


def test_what_one_rank_does_alone_is_named_with_its_rank(golden: Golden) -> None:
    slow = merged([rank(0.16), rank(0.02, extra=14.0)])
    (line,) = odd_ranks(SOUND, slow)
    said = points_to(step_difference(SOUND, slow))
    assert line in said
    golden(said)


def test_one_that_is_slower_and_does_nothing_else_is_the_one_that_others_wait_for(golden: Golden) -> None:
    golden(last_rank(SOUND, merged([rank(0.02), rank(0.09), rank(0.1)])))


def straggling(**more: Any) -> Trace:
    """Of two ranks, the second does ``more`` for 140 ms, for which the first waits."""
    waits = replace(rank(0.16), step_seconds=0.62, busy_seconds=0.61, exposed_seconds=0.14)
    return merged([waits, replace(rank(0.02), **{"step_seconds": 0.62, "busy_seconds": 0.47, **more})])


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"data_seconds": 0.14}, "its data takes 140.0 ms more"),
        ({"data_seconds": 0.08}, "its data takes 80.0 ms more, its host takes 60.0 ms more"),
        ({"data_seconds": 0.13}, "its data takes 130.0 ms more"),
        ({}, "its host takes 140.0 ms more"),
        ({"busy_seconds": 0.61}, "the same work takes it 30 % longer (clocks, or others on its device)"),
        ({"busy_seconds": 0.61, "rows": rank(0.02, extra=14.0).rows}, "it does more work, 140.0 ms"),
    ],
    ids=["data", "data and host", "mostly data", "host", "clocks", "work"],
)
def test_what_of_a_rank_takes_longer_is_said_of_it(more: dict[str, Any], why: str) -> None:
    found = last_rank(SOUND, straggling(**more))
    assert "for rank 1, " in found
    assert found.endswith(f" of it): {why}")
    assert found in points_to(step_difference(SOUND, straggling(**more)))


def test_on_a_host_a_rank_is_waited_for_beyond_what_cores_that_are_shared_explain() -> None:
    def host(exchange: float) -> Trace:
        rows = (TraceRow("operator", "aten::mm", 4.0, 0.05),)
        return Trace(rows=rows, steps=3, step_seconds=0.4, busy_seconds=0.05, exchange_seconds=exchange)

    usual = merged([host(0.03), host(0.02)])
    found = last_rank(usual, merged([host(0.25), host(0.02)]))
    assert "for rank 1, " in found
    assert "): its host takes" in found
    assert last_rank(usual, merged([host(0.1), host(0.02)])) == ""


def test_what_a_rank_did_before_is_no_news() -> None:
    before = merged([rank(logs=2.0), rank()])
    assert odd_ranks(before, before) == ()
    (line,) = odd_ranks(before, merged([rank(logs=3.0), rank()]))
    assert "rank 0 " in line


def test_what_a_rank_did_each_third_step_is_no_news_of_a_baseline_that_was_stored() -> None:
    now = merged([rank(logs=1 / 3), rank()])
    as_stored = [
        replace(
            one, apart={kind: {name: round(more, 6) for name, more in rows.items()} for kind, rows in one.apart.items()}
        )
        for one in now.by_rank
    ]
    assert any(one.more for one in now.by_rank)
    assert odd_ranks(replace(now, by_rank=tuple(as_stored)), now) == ()


def test_an_exchange_of_one_rank_is_told_by_its_number_and_not_by_its_bytes() -> None:
    sends = [TraceRow("exchange", "send", 1.0, 0.0), TraceRow("payload", "send", 4096.0, 0.0)]
    one = rank()
    sent = replace(one, rows=tuple(sorted((*one.rows, *sends))))
    (line,) = odd_ranks(SOUND, merged([sent, rank()]))
    assert line.endswith("alone: send +1")


def test_where_all_do_something_else_no_rank_is_odd() -> None:
    assert odd_ranks(SOUND, merged([rank(one=1.0), rank(two=1.0), rank(three=1.0)])) == ()


def test_a_trace_of_before_that_does_not_tell_its_ranks_serves_as_far_as_it_goes() -> None:
    older = replace(SOUND, by_rank=())
    slow = merged([rank(0.16), rank(0.02, extra=14.0)])
    (line,) = odd_ranks(older, slow)
    assert "rank 1 " in line
    assert "for rank 1, " in last_rank(older, slow)
    # The same wait, which nobody could see then.
    assert last_rank(replace(slow, by_rank=()), slow) == ""


def test_what_a_rank_did_while_nobody_told_of_ranks_is_no_news() -> None:
    before = merged([rank(logs=2.0), rank()])
    older = replace(before, by_rank=())
    assert odd_ranks(older, before) == ()
    (line,) = odd_ranks(older, merged([rank(logs=2.0, extra=4.0), rank()]))
    assert line.endswith("alone: extra +4")


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(1, 50)), min_size=2, max_size=32))
def test_what_ranks_did_is_read_as_it_was_written(ranks: Sequence[tuple[float, int]]) -> None:
    trace = merged([rank(seconds, extra=float(count)) for seconds, count in ranks])
    assert codec.read(Trace, codec.plain(trace)) == trace
    assert len(trace.by_rank) == len(ranks)


@pytest.mark.parametrize(
    "broken", [{}, {"exchange_seconds": -1}, {"exchange_seconds": "x"}, [], {"exchange_seconds": 0, "apart": 3}]
)
def test_ranks_that_somebody_broke_are_refused_in_one_line(broken: object) -> None:
    values = {**codec.plain(SOUND), "by_rank": [broken]}
    with pytest.raises(ValueError, match=r"^by_rank\[0\].*(expected|has no)"):
        codec.read(Trace, values)


def test_one_rank_has_no_others() -> None:
    assert merged([rank()]).by_rank == ()
    assert "by_rank" not in codec.plain(merged([rank()]))
