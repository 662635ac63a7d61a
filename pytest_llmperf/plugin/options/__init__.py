"""The command line and the ini file: a file for each group of options; ``run_options`` reads all into ``Settings``.

May import: what ``plugin`` may.
"""
