"""``python -m pytest_llmperf``: the command ``llmperf``, where no script was installed."""

from pytest_llmperf.cli.answer import main

raise SystemExit(main())
