"""``python -m pytest_llmperf``: the command ``llmperf``, where no script was installed."""

from pytest_llmperf.cli.answer import main

if __name__ == "__main__":
    raise SystemExit(main())
