"""What the command's options take, for argparse: each refuses in one line what it is not."""

from __future__ import annotations

from pytest_llmperf.support import quantities
from pytest_llmperf.support.quantities import argument

duration = argument(quantities.duration_hours, "a time above 0, e.g. 24h, 2d, 1d12h or 90m")
mail = argument(quantities.mail, "an address, or several with commas; none begins with -")
