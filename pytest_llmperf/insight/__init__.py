"""The old name of ``pytest_llmperf.analysis`` and its modules, for suites that import them by it. It goes with 2.0."""

import sys
import warnings

from pytest_llmperf.analysis import formulas, ladder, waits

warnings.warn(
    "pytest_llmperf.insight is deprecated: its modules are pytest_llmperf.analysis.formulas, ladder and waits",
    DeprecationWarning,
    stacklevel=2,
)
__all__ = ["cost", "ladder"]
chapter15 = ladder
chip_utilisation = cost = memory_formulas = roofline = formulas
data_waits = stragglers = waits
for _name in "chapter15 chip_utilisation cost data_waits ladder memory_formulas roofline stragglers".split():
    sys.modules[f"{__name__}.{_name}"] = globals()[_name]
