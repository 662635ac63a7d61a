"""Writes again what the documentation's pages show of llmperf: ``python -m tools.documentation``."""

from __future__ import annotations

import tempfile
from importlib.util import find_spec
from pathlib import Path

from tools.documentation.blocks import REPOSITORY, blocks_of, pages
from tools.documentation.printed import folder_for_commands, refreshed


def main() -> None:
    for page in pages():
        text = page.read_text(encoding="utf-8")
        with tempfile.TemporaryDirectory() as name:
            folder = folder_for_commands(Path(name))
            for block in blocks_of(page):
                if block.origin == "run" and (block.detail != "torch" or find_spec("torch")):
                    text = text.replace(block.text, refreshed(block, folder), 1)
        if text != page.read_text(encoding="utf-8"):
            page.write_text(text, encoding="utf-8")
            print(f"{page.relative_to(REPOSITORY)}: written again")


if __name__ == "__main__":
    main()
