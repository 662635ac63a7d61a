"""Vega-Lite specifications on standard input become SVG on standard output, both as a JSON list.

A program of its own, which imports nothing of ours: the library ends its whole process where it finds what it did not
expect, and that must not be the one that has measured.
"""

from __future__ import annotations

import json
import sys


def main() -> None:
    import vl_convert  # noqa: PLC0415 - by whoever runs this, and nobody who looks at it

    drawn = []
    for specification in json.load(sys.stdin):
        try:
            drawn.append(str(vl_convert.vegalite_to_svg(specification)))
        except ValueError:
            drawn.append("")
    json.dump(drawn, sys.stdout)


if __name__ == "__main__":
    main()
