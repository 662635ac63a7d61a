"""What was measured and concluded, as data that is written to files and read again; nothing here judges.

``launch`` is one run of torchrun, ``steady_state`` what its steps show, ``launch_end`` when they are enough,
``result`` one case's conclusion, ``failure`` why there is none. May import: ``spec`` and ``support``.
"""
