"""The statistics of launches, and the rule that decides on them."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_llmperf.judge.policy import Rule, decide
from pytest_llmperf.judge.stats import (
    Difference,
    Experience,
    Noise,
    Spread,
    difference,
    disagreement,
    paired_difference,
    without_outliers,
)
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.settings.train_spec import TrainSpec
from tests.fakes import Fake, launch_of

SPEC = TrainSpec(model="llama-tiny", sequence_length=64, steps=12)
NOISE = Noise(host=Spread(0.01, 6), site=Spread(0.01, 10), session=Spread(0.003, 8), launch=Spread(0.004, 8))


def launch(seconds: float = 0.1, host: str = "host", day: int = 1) -> Launch:
    made = launch_of(SPEC, Fake(step_seconds=seconds))
    ranks = tuple(replace(rank, host=host) for rank in made.ranks)
    return replace(made, ranks=ranks, started_at=f"2026-01-{day:02d}T00:00:00Z")


class TestDifference:
    def test_the_same_session_is_known_best_and_another_site_least(self) -> None:
        baseline = [launch(day=1), launch(day=1), launch(day=2)]
        same, later, elsewhere = (
            difference([candidate], baseline, NOISE).error
            for candidate in (launch(day=1), launch(day=9), launch(host="other"))
        )
        assert same < later < elsewhere
        # A session that was seen shares its deviation: what is left is little more than two launches' own.
        assert same < 0.006
        assert elsewhere > 0.01

    def test_a_known_site_is_held_against_itself(self) -> None:
        fast, slow = [launch(0.1, "a") for _ in range(4)], [launch(0.103, "b") for _ in range(4)]
        here = difference([launch(0.103, "b", 5)], [*fast, *slow], NOISE)
        assert abs(here.log) < 0.006
        assert difference([launch(0.103, "c")], [*fast, *slow], NOISE).log > 0.01

    def test_more_launches_narrow_it_down_to_what_the_site_leaves(self) -> None:
        errors = [difference([launch(host="new")] * number, [launch(), launch()], NOISE).error for number in (1, 2, 4)]
        assert errors[0] > errors[1] > 0.01

    def test_launches_that_disagree_widen_it(self) -> None:
        calm = difference([launch(0.1), launch(0.1)], [launch(), launch()], NOISE)
        wild = difference([launch(0.09), launch(0.11)], [launch(), launch()], NOISE)
        assert wild.error > 3 * calm.error

    def test_of_three_launches_an_outlier_does_not_move_the_centre(self) -> None:
        assert abs(difference([launch(), launch(0.15), launch()], [launch(), launch()], NOISE).log) < 1e-9

    def test_a_baselines_outlier_is_left_out(self) -> None:
        baseline = [launch(), launch(0.1001), launch(0.0999), launch(0.15)]
        assert len(without_outliers(baseline, NOISE)) == 3
        assert abs(difference([launch()], baseline, NOISE).log) < 0.002
        assert len(without_outliers(baseline[1:], NOISE)) == 2
        # Of two nobody can say which one is right.
        assert len(without_outliers(baseline[2:], NOISE)) == 2

    def test_zero_variance_everywhere_decides(self) -> None:
        none = Noise(host=Spread(0, 6), site=Spread(0, 10), session=Spread(0, 8), launch=Spread(0, 8))
        exact = difference([launch(0.101)], [launch(), launch()], none)
        assert exact.error == 0
        assert exact.log == pytest.approx(math.log(1.01))

    @given(st.lists(st.floats(0.05, 0.2), min_size=1, max_size=5), st.floats(0.5, 2.0))
    def test_the_unit_of_time_does_not_matter(self, times: list[float], scale: float) -> None:
        one = difference([launch(0.1)], [launch(time) for time in times], NOISE)
        other = difference([launch(0.1 * scale)], [launch(time * scale) for time in times], NOISE)
        assert one.log == pytest.approx(other.log, abs=1e-9)
        assert one.error == pytest.approx(other.error)


class TestPaired:
    def test_what_pairs_share_takes_itself_out(self) -> None:
        pairs = [(launch(0.1 * drift), launch(0.102 * drift)) for drift in (1.0, 1.05, 1.1, 1.2)]
        found = paired_difference(pairs, NOISE)
        assert found.log == pytest.approx(math.log(1.02))
        assert found.error < 0.003

    @given(st.lists(st.tuples(st.floats(0, 0.4), st.floats(0, 0.4)), min_size=1, max_size=4))
    def test_pairs_are_known_no_better_than_their_medians(self, scatter: list[tuple[float, float]]) -> None:
        pairs = [(wavering(before), wavering(after)) for before, after in scatter]
        own = sum(each.median_error**2 for pair in pairs for each in pair)
        assert paired_difference(pairs, NOISE).error >= math.sqrt(own) / len(pairs) * (1 - 1e-9)

    def test_two_equal_sides_whose_steps_scatter_are_no_alarm_and_no_praise(self) -> None:
        chance = random.Random(2)
        assert not {self.night(chance) for _ in range(60)} & {"regressed", "improved"}

    def night(self, chance: random.Random) -> str | None:
        """What two equal sides, whose medians are known to 2.5 %, end in."""
        pairs: list[tuple[Launch, Launch]] = []
        decision = None
        while decision is None and len(pairs) < Rule().budget:
            sides = [tuple(0.1 * math.exp(chance.gauss(0, 0.06)) for _ in range(SPEC.steps)) for _ in range(2)]
            pairs.append((stepping(sides[0]), stepping(sides[1])))
            decision = decide(paired_difference(pairs, NOISE), 0.01, Rule()).verdict
        return decision


def stepping(steps: tuple[float, ...]) -> Launch:
    made = launch()
    return replace(made, ranks=tuple(replace(rank, step_seconds=steps) for rank in made.ranks))


def wavering(scatter: float) -> Launch:
    """Every other step slower by ``scatter``."""
    return stepping(tuple(0.5 if n < 4 else 0.1 * (1 + scatter * (n % 2)) for n in range(SPEC.steps)))


def decided(log: float, error: float, number: int = 2, df: float = 20, tolerance: float = 0.02) -> str | None:
    return decide(seen(log, error, number, df), tolerance, Rule()).verdict


def seen(log: float, error: float, number: int = 1, df: float = 20, launch_sd: float | None = None) -> Difference:
    return Difference(log, error, df, error if launch_sd is None else launch_sd, (log,) * number)


class TestRule:
    @pytest.mark.parametrize(
        ("log", "error", "verdict"),
        [
            (0.0, 0.002, "pass"),
            (0.01, 0.002, "pass"),
            (0.05, 0.002, "regressed"),
            (-0.05, 0.002, "improved"),
            (0.021, 0.002, "regressed"),
            (0.0195, 0.002, None),
            (0.03, 0.02, "inconclusive"),
        ],
    )
    def test_tolerance_and_noise(self, log: float, error: float, verdict: str | None) -> None:
        assert decided(log, error) == verdict

    def test_one_launch_is_never_an_alarm_unless_it_is_all_there_is(self) -> None:
        assert decided(0.5, 0.002, number=1) is None
        alone = Rule(budget=1)
        assert decide(seen(0.5, 0.002), 0.02, alone).verdict == "regressed"

    def test_the_budget_ends_in_inconclusive(self) -> None:
        assert decided(0.03, 0.02, number=4) == "inconclusive"

    def test_launches_that_could_decide_nothing_are_not_spent(self) -> None:
        # All of the error is the site's: more launches here would not narrow it.
        hopeless = decide(seen(0.03, 0.02, df=12, launch_sd=0.001), 0.05, Rule())
        assert hopeless.verdict == "inconclusive"

    def test_what_it_can_see_grows_with_the_noise(self) -> None:
        least, more, most = (decide(seen(0, error), 0.02, Rule()).detectable for error in (0.001, 0.01, 0.05))
        assert 0.02 < least < more < most

    def test_alarms_allowed_a_month(self) -> None:
        assert Rule.allowing(1, 4, 4).alpha == 1e-3
        assert Rule.allowing(1, 100, 4).alpha == pytest.approx(1 / 3000)

    @given(st.floats(-0.2, 0.2), st.floats(0, 0.05), st.integers(1, 4))
    def test_slower_is_never_judged_better(self, log: float, error: float, number: int) -> None:
        order = ("improved", "pass", None, "inconclusive", "regressed")
        first, then = (order.index(decided(value, error, number)) for value in (log, log + 0.01))
        # Another launch may be wanted on either side of a decision.
        assert then >= first or None in (order[first], order[then]) or "inconclusive" in (order[first], order[then])


class TestExperience:
    def test_nothing_seen_is_what_was_believed(self) -> None:
        assert Experience.of([], NOISE).noise == NOISE
        assert Experience.of([[launch()]], NOISE).noise == NOISE

    def test_quiet_cases_teach_quiet(self) -> None:
        cases = [[launch(0.1 * (1 + 0.0005 * (n % 3))) for n in range(4)] for _ in range(12)]
        assert Experience.of(cases, NOISE).noise.launch.sd < 0.003

    def test_loud_cases_teach_loud(self) -> None:
        cases = [[launch(0.1 * (1 + 0.02 * (n % 3))) for n in range(4)] for _ in range(12)]
        assert Experience.of(cases, NOISE).noise.launch.sd > 0.01

    def test_cases_that_differ_are_known_less_well(self) -> None:
        alike = [[launch(0.1 * (1 + 0.002 * (n % 2))) for n in range(6)] for _ in range(12)]
        mixed = [[launch(0.1 * (1 + 0.0001 * 4**case * (n % 2))) for n in range(6)] for case in range(6)]
        assert Experience.of(mixed, NOISE).noise.launch.df < Experience.of(alike, NOISE).noise.launch.df

    @pytest.mark.parametrize("number", [1, 2])
    def test_nor_where_there_are_few_cases(self, number: int) -> None:
        cases = [[launch(0.1 + 0.0001 * n, day=1 + n // 2) for n in range(6)] for _ in range(number)]
        without = Experience.of(cases, NOISE).noise
        cases[-1][-1] = launch(0.13, day=3)
        spoilt = Experience.of(cases, NOISE).noise
        for name, spread in vars(spoilt).items():
            assert spread.sd < 1.2 * getattr(without, name).sd

    def test_a_day_that_moves_every_case_counts_once(self) -> None:
        cases = [[launch(0.1, day=1), launch(0.11, day=2)] for _ in range(20)]
        learnt = Experience.of(cases, NOISE).noise.session
        assert NOISE.session.sd < learnt.sd < 0.03  # one difference of 10 %, not twenty
        assert learnt.df < NOISE.session.df  # one more case may be different

    def test_one_bad_launch_of_one_case_blinds_nobody(self) -> None:
        cases = [[launch(0.1 * (1 + 0.002 * (n % 2))) for n in range(4)] for _ in range(12)]
        without = Experience.of(cases, NOISE).noise
        cases[0][0] = launch(0.13)
        spoilt = Experience.of(cases, NOISE).noise
        assert spoilt.launch.sd < 2 * without.launch.sd < 0.15 * abs(math.log(1.3))
        assert (spoilt.session.sd, spoilt.site.sd) == (without.session.sd, without.site.sd)

    def test_sites_count_once_too(self) -> None:
        cases = [[launch(0.1, "a"), launch(0.1, "b"), launch(0.1, "c")] for _ in range(20)]
        learnt = Experience.of(cases, NOISE).noise.host  # a CPU has its host to itself
        assert 0.8 * NOISE.host.sd < learnt.sd < NOISE.host.sd  # three of them, not sixty

    def test_canaries_are_kept_by_world_size(self) -> None:
        sung = replace(launch(), canary={"matmul_flops": 8e14})
        assert Experience.of([[sung], [sung]], NOISE).canaries == {"1 matmul_flops": (8e14, 8e14)}


CLEAN = [launch(0.1, day=day) for day in (1, 1, 2, 2, 3, 3)]


class TestOneLaunchThatWentWrong:
    def verdicts(self, *seconds: float) -> list[str | None]:
        """After one launch, after two, and so on."""
        launches = [launch(each, day=9) for each in seconds]
        return [
            decide(difference(launches[:number], CLEAN, NOISE), 0.02, Rule()).verdict
            for number in range(1, len(launches) + 1)
        ]

    @pytest.mark.parametrize("odd", [0.08, 0.11, 0.12, 0.15])
    def test_is_no_alarm_and_no_praise(self, odd: float) -> None:
        assert not {"regressed", "improved"} & {*self.verdicts(odd, 0.1, 0.1, 0.1), *self.verdicts(0.1, 0.1, 0.1, odd)}

    def test_two_of_them_are_an_alarm(self) -> None:
        assert self.verdicts(0.106, 0.1062)[-1] == "regressed"

    def test_in_pairs_too(self) -> None:
        pairs = [(launch(0.1), launch(0.12)), *[(launch(0.1), launch(0.1))] * 3]
        found = [decide(paired_difference(pairs[:number], NOISE), 0.01, Rule()).verdict for number in (1, 2, 3, 4)]
        assert "regressed" not in found

    def test_in_a_recording_is_told(self) -> None:
        assert disagreement(CLEAN, NOISE, 0.02) == ""
        assert "20.0 % apart" in disagreement([launch(0.1), launch(0.12)], NOISE, 0.02)
        assert disagreement([launch(0.1, day=1), launch(0.12, day=2)], NOISE, 0.02) == ""  # days may differ


class TestOwnScatter:
    """A case that scatters more than the others is judged by its own scatter."""

    @pytest.mark.parametrize("places", [[("host", 1), ("host", 2), ("host", 3)], [("a", 1), ("b", 1), ("c", 1)]])
    def test_of_days_and_hosts(self, places: list[tuple[str, int]]) -> None:
        calm = [launch(0.1, *place) for place in places for _ in range(2)]
        moody = [launch(0.097 + 0.003 * number, *place) for number, place in enumerate(places) for _ in range(2)]
        tonight = [launch(0.1, "host", 9)]
        assert difference(tonight, moody, NOISE).error > 1.4 * difference(tonight, calm, NOISE).error

    def test_gpus_of_one_host_say_little_of_another_host(self) -> None:
        def on(device: str, host: str) -> Launch:
            made = launch(0.1)
            return replace(made, ranks=tuple(replace(rank, device=device, host=host) for rank in made.ranks))

        uuid = "0f5ddc53-5e15-3455-549e-29935d46feb{}"
        one_host = [on(uuid.format(n), "a") for n in range(8)]
        eight_hosts = [on(uuid.format(n), f"host{n}") for n in range(8)]
        tonight = [on(uuid.format(9), "z")]
        assert difference(tonight, one_host, NOISE).error > 1.2 * difference(tonight, eight_hosts, NOISE).error

    def test_a_launch_whose_median_is_not_known_weighs_less(self) -> None:
        vague = wavering(0.2)
        assert vague.median_error > 0.02
        assert (
            difference([vague], [launch()] * 4, NOISE).error > 2 * difference([launch()], [launch()] * 4, NOISE).error
        )
        # One more of its kind is known no better, and so narrows the rest by as much.
        assert difference([vague], [launch()] * 4, NOISE).launch_sd == pytest.approx(vague.median_error)

    def test_a_launch_of_few_steps_is_not_exact(self) -> None:
        few = stepping((0.5, 0.1, 0.104, 0.098, 0.103, 0.1))
        assert 0.01 < few.median_error < 0.05
        alone = replace(few, ranks=tuple(replace(rank, step_seconds=(0.5, 0.1)) for rank in few.ranks), warmup_steps=1)
        assert alone.median_error > 0.02
