"""Commands one after the other, and beside them one that mostly waits: ``side_by_side.py A… --then B… --beside C…``.

What the one beside them prints comes when they have ended. The exit code is the first that is not 0; that of a pytest
none of whose tests was asked for counts only where the others had none either.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence

NO_TESTS = 5  # as pytest says it


def split(words: Sequence[str], separator: str) -> list[list[str]]:
    """``words`` between the separators."""
    parts: list[list[str]] = [[]]
    for word in words:
        if word == separator:
            parts.append([])
        else:
            parts[-1].append(word)
    return parts


def main(words: Sequence[str]) -> int:
    """See above."""
    following, beside = split(words, "--beside")
    codes = []
    with tempfile.TemporaryFile() as told:
        other = subprocess.Popen(beside, stdin=subprocess.DEVNULL, stdout=told, stderr=subprocess.STDOUT)
        try:
            codes += [subprocess.call(command) for command in split(following, "--then")]
            codes.append(other.wait())
        finally:
            if other.poll() is None:  # Ctrl-C, which it has heard too
                other.terminate()
                other.wait()
            told.seek(0)
            sys.stdout.flush()
            sys.stdout.buffer.write(told.read())
    ran = [code for code in codes if code != NO_TESTS]
    return next((code for code in ran if code), 0) if ran else NO_TESTS


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
