"""Put tox into a private virtual environment: ``python3 tools/bootstrap.py``, run by the Makefile.

Uses the standard library alone and runs on Python 3.6 already, to be able to say what is missing.
"""

import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".bootstrap"


def missing() -> str:
    """What keeps this Python from making an environment, and the way out; empty if nothing does."""
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    if sys.version_info < (3, 10):  # noqa: UP036 - to say so is what this file is for
        return f"{sys.executable} is Python {version}; 3.10 or newer is needed: make PYTHON=/path/to/python3 ..."
    if find_spec("venv") is None or find_spec("ensurepip") is None:
        return (
            f"{sys.executable} cannot make virtual environments (no ensurepip); on Debian and Ubuntu: "
            f"sudo apt-get install python3-venv (or python{version}-venv)"
        )
    return ""


def main() -> int:
    """Make the environment anew and install the pinned tox into it."""
    trouble = missing()
    if trouble:
        print(f"bootstrap: {trouble}", file=sys.stderr)
        return 1
    # What an interrupted run or another Python left is not repaired.
    shutil.rmtree(FOLDER, ignore_errors=True)
    commands = (
        [sys.executable, "-m", "venv", FOLDER.name],
        [str(FOLDER / "bin" / "python"), *"-m pip install --quiet --no-compile -c constraints.txt tox".split()],
    )
    for command in commands:
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
        if code != 0:
            print(f"bootstrap: exit {code} from: {' '.join(command)}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
