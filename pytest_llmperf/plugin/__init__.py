"""What pytest sees. This process never imports torch: training happens in the worker.

``hooks`` is the entry point, ``perf`` the fixture over the engine, ``session`` a run's context with pytest's outcomes;
``options/`` reads the command line. The only room that imports pytest. May import: every room but ``cli``
and ``worker``.
"""
