"""The ``perf`` fixture: what a test asks of the run, and pytest's outcome of what that concludes.

Test files import the class for its name: what launches and judges is loaded by the first test that asks."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast

import pytest

from pytest_llmperf.plugin import needs
from pytest_llmperf.plugin.reports import FINDINGS, failed, record_benchmark
from pytest_llmperf.records.result import PLANNED, CaseResult
from pytest_llmperf.run.findings import Concluded, DidNotTrainError, Findings
from pytest_llmperf.settings.spec import ScriptSpec, Spec
from pytest_llmperf.settings.train_spec import TrainSpec
from pytest_llmperf.support.user_input import A_TIME, is_minutes

if TYPE_CHECKING:
    from pytest_llmperf.plugin.collector import PerfSession
    from pytest_llmperf.records.launch import Launch

_Method = TypeVar("_Method", bound=Callable[..., Any])


def _asked(method: _Method) -> _Method:
    """``method`` with pytest's outcomes; other arguments than it has, or no spec for one, fail the test in one line."""
    signature = inspect.signature(method)
    words = {name: each for name, each in signature.parameters.items() if name != "self"}
    # Annotations are text here; a spec that may be left out is None.
    kinds: dict[str, type[Any]] = {"Spec": Spec, "TrainSpec": TrainSpec}
    specs = {
        name: (kind, each.default)
        for name, each in words.items()
        if (kind := kinds.get(str(each.annotation).partition(" ")[0]))
    }

    @functools.wraps(method)
    def checked(self: Perf, *args: Any, **kwargs: Any) -> Any:
        try:
            given = signature.bind(self, *args, **kwargs).arguments
        except TypeError as error:
            expected = ", ".join(str(each).partition(":")[0] for each in words.values())
            raise failed(f"perf.{method.__name__}: {error}; expected {expected}") from None
        with self._session.outcomes():
            for name, (kind, default) in specs.items():
                if given.get(name, default) is not default:
                    needs.a_spec(method.__name__, given[name], kind)
            try:
                return method(self, *args, **kwargs)
            except DidNotTrainError as error:
                if not error.may_train_again:
                    raise
                raise DidNotTrainError(f"{error}\nrun it again: {self._session.rerun(self._item)}") from None

    return cast("_Method", checked)


class Perf:
    """What a test calls. One test may check several specs."""

    def __init__(self, request: pytest.FixtureRequest, session: PerfSession) -> None:
        from pytest_llmperf.plugin.console import Console
        from pytest_llmperf.plugin.markers import terms_of

        self._request, self._session = request, session
        self._item: pytest.Item = request.node
        findings = self._item.stash.setdefault(FINDINGS, Findings())
        self._cases = session.cases(self._item.nodeid, Console(self._item.config), terms_of(self._item), findings)

    @_asked
    def measure(self, spec: Spec) -> tuple[Launch, ...]:
        """Launch ``spec`` as often as this run asks for (``--perf-launches``) and return the records.
        A launch that yields no record fails the test with ``DidNotTrain``."""
        return self._cases.measure(spec)

    @_asked
    def check(self, spec: Spec, *, scaled_from: Spec | None = None) -> CaseResult:
        """Launch ``spec`` until it is decided against its baseline, and fail the test unless it holds.

        The efficiency of several GPUs is over the same spec on the fewest, or over ``scaled_from`` where the work of a
        GPU changes with their number. What another test has measured of the very same case is not launched again.
        A case that cannot run here is skipped with the reason. Under ``--update-baselines`` its figures are recorded.
        A run that launches nothing returns a result without figures, whose verdict is ``planned``, so that the test
        goes on to its next spec."""
        if scaled_from is not None and scaled_from.digest == spec.digest:
            scaled_from = None  # of a series that is written as one, the narrowest names itself
        if scaled_from is not None:
            needs.a_narrower_training(spec, scaled_from)
        return self._told(self._cases.check(spec, scaled_from))

    @_asked
    def script(self, command: str | ScriptSpec, /, **fields: Any) -> CaseResult:
        """Run a training command as it is, watched from outside, and hold it as ``check`` holds a spec.

        ``fields`` are those of ``ScriptSpec``: ``gpus`` and ``micro_batch_size`` fill ``{gpus}`` and
        ``{micro_batch_size}`` in the command."""
        spec = command if isinstance(command, ScriptSpec) else ScriptSpec(command=command, **fields)
        return self._told(self._cases.check(spec))

    @_asked
    def compare(  # noqa: PLR0913 - two specs and five named bounds
        self,
        before: Spec,
        after: Spec,
        /,
        *,
        throughput_at_least: float | None = None,
        throughput_at_most: float | None = None,
        memory_at_least: float | None = None,
        memory_at_most: float | None = None,
        loss_within: float | None = None,
    ) -> CaseResult:
        """Launch both specs in turns on the same GPUs and fail the test unless ``after`` keeps the bounds.

        Bounds are ratios ``after / before`` of tokens/s per GPU and of peak memory. It needs no baseline, so it holds
        on hardware that has none. Without bounds the ratios are only told, which a note says.
        ``loss_within`` (nats) bounds how far apart the losses of any step may be, of two specs that take the same
        tokens a step."""
        from pytest_llmperf.judge.pairs import Bounds

        needs.nats(loss_within)
        try:
            bounds = {
                "throughput": Bounds(at_least=throughput_at_least, at_most=throughput_at_most, of="throughput"),
                "memory": Bounds(at_least=memory_at_least, at_most=memory_at_most, of="memory"),
                "loss": Bounds(at_most=loss_within),
            }
        except ValueError as error:
            raise failed(f"perf.compare: {error}") from None
        if loss_within is not None:
            needs.the_same_tokens(before, after)
        return self._told(self._cases.compare(before, after, bounds))

    @_asked
    def max_micro_batch(self, spec: Spec) -> CaseResult:
        """Find the largest micro-batch of ``spec`` that trains, to the unit, and fail the test if it was larger.

        A fresh launch has trained it, and another has run out of memory with one sequence more. The size that
        ``spec`` has is where the search begins if its memory cannot be predicted."""
        needs.sizes(spec)
        return self._told(self._cases.max_micro_batch(spec))

    @_asked
    def same_training(self, spec: TrainSpec, other: TrainSpec | None = None, /) -> CaseResult:
        """Fail the test unless ``other`` learns what ``spec`` does; ``spec`` alone, what its plain form does.

        Each is made small, begins with the same weights, sees the same rows of unequal length, and its losses, each
        gradient and each update may be no further from those in double precision than rounding takes the plain form's.
        Precision, batch and the number of GPUs may differ. It needs no baseline."""
        if other is not None:
            needs.the_same_training(spec, other)
        return self._told(self._cases.same_training(spec, *([] if other is None else [other])))

    @_asked
    def tune(self, spec: TrainSpec, *, over: Mapping[str, Any], runners_up: int = 3) -> CaseResult:
        """Tell whether ``spec``, a winner of ``llmperf tune``, still is the fastest of its neighbours.

        ``over`` says what may change, by field, as a space in TOML does: ``{"attention": ["sdpa",
        "flash_attention_2"]}``. Each neighbour differs by one choice; those that are nearest to it in a trial take
        turns with it, ``runners_up`` at most. One that is shown to be faster by more than 1 %, on a CPU by
        the case's tolerance, makes the case ``improved``, which fails under ``--perf-strict``. It needs no baseline."""
        return self._told(self._cases.tune(spec, needs.a_space(spec, over, runners_up), runners_up))

    @_asked
    def soak(self, training: str | Spec, /, *, minutes: float = 30.0) -> CaseResult:
        """Let a spec, or a script's command, take steps for so many ``minutes`` in one launch, and judge it by itself.

        It fails where steps become longer, something of the process only grows, or stalls cost more than they may. It
        needs no baseline, and records none. Ctrl-C ends it, and what was seen by then is reported."""
        if not is_minutes(minutes):
            raise failed(f"perf.soak: minutes={minutes!r}, expected {A_TIME}")
        if not isinstance(training, (str, Spec)):
            raise failed(f"perf.soak: {training!r}, expected a command, a TrainSpec or a ScriptSpec, e.g. train_spec")
        spec = ScriptSpec(command=training) if isinstance(training, str) else training
        return self._told(self._cases.soak(spec, minutes))

    def _told(self, conclusion: Concluded) -> CaseResult:
        """The result of a case that holds; what does not fails the test."""
        result = conclusion.result
        if result.verdict == PLANNED:
            return result
        record_benchmark(self._request, result)
        if conclusion.fails:
            raise failed(conclusion.message(self._session.rerun(self._item)))
        if conclusion.refused:
            raise failed(f"{result.id}: {conclusion.refused}")
        return result
