"""Replaced cases: what this run recorded in the place of a test's former ones, taken back where nobody said why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pytest_llmperf.judge.acceptance import replaced, replaced_line
from pytest_llmperf.judge.baseline import Baseline
from pytest_llmperf.judge.baseline_file import BaselineError
from pytest_llmperf.judge.store import BaselineStore
from pytest_llmperf.plugin.session import PerfSession
from pytest_llmperf.run.coverage import ALL
from pytest_llmperf.settings.train_spec import TrainSpec


def settle(session: PerfSession) -> list[str]:
    """A line for each that needs a reason. Only the end of a run knows which cases its tests still have."""
    settings, findings = session.settings, session.findings
    first = [one for one in findings.results if one.updated and one.verdict == "new" and one.launches]
    if settings.static or not first:
        return []
    store = BaselineStore(settings.baselines)
    stored = store.baselines(session.machine_kind)
    whole = {node for node, said in session.coverage.said.items() if said == ALL}
    found = list(replaced(first, stored, set(findings.digests), whole, session.collected))
    gone = {result.digest: [one.digest for one in formers] for result, formers in found}
    own = [one for one in stored if one.digest in gone]
    if settings.reason:
        return [line for one in own if (line := _explained(store, one, gone[one.digest]))]
    for one in own:
        store.path(one.machine, TrainSpec.from_dict(one.spec)).unlink(missing_ok=True)
    findings.results = [replace(one, updated="") if one.digest in gone else one for one in findings.results]
    return list(dict.fromkeys(replaced_line(result, formers[0]) for result, formers in found))


def _explained(store: BaselineStore, baseline: Baseline, gone: Sequence[str]) -> str:
    """Keep what was replaced, so that nobody is asked again; why not, where that fails."""

    def change(now: Baseline | None) -> Baseline:
        now = now or baseline
        anchor = replace(now.anchor, replaces=tuple(sorted(gone)))
        return replace(now, anchor=anchor, history=(anchor, *now.history[1:]))

    try:
        store.update(baseline.machine, TrainSpec.from_dict(baseline.spec), change)
    except BaselineError as error:
        return str(error)
    return ""
