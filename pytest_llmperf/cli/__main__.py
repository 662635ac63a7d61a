"""``python -m pytest_llmperf.cli``: the same command where no script was installed."""

import runpy

if __name__ == "__main__":
    runpy.run_module("pytest_llmperf", run_name="__main__")
