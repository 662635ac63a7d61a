"""The old name of ``pytest_llmperf.analysis``, for suites that import the chapter's ladder by it. It goes with 2.0."""

import sys
import warnings

from pytest_llmperf.analysis import ladder

warnings.warn(
    "pytest_llmperf.insight is deprecated: import chapter15 and ladder as pytest_llmperf.analysis.ladder",
    DeprecationWarning,
    stacklevel=2,
)
chapter15 = ladder
sys.modules[f"{__name__}.chapter15"] = sys.modules[f"{__name__}.ladder"] = ladder
