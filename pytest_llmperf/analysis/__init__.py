"""What measured figures mean: causes, cost, scaling, ladders. Pure."""

import sys

from pytest_llmperf.analysis import formulas

#: By its old name, as suites import it. It goes with 2.0.
cost = sys.modules[f"{__name__}.cost"] = formulas
