"""A command's options, read once it is called."""

from __future__ import annotations

import argparse
from importlib import import_module
from typing import Any


class CommandParser(argparse.ArgumentParser):
    """That of one command; its ``module`` has ``add_options(parser)``.

    Whoever calls one command pays for the imports of no other.
    """

    def __init__(self, *, module: str = "", **words: Any) -> None:
        super().__init__(**words)
        self._module = module

    def parse_known_args(self, *args: Any, **others: Any) -> Any:
        """As argparse does, with the options of the module."""
        if self._module:
            module, self._module = import_module(self._module), ""
            module.add_options(self)
        return super().parse_known_args(*args, **others)
