"""Whether what a page takes is installed, asked before anything is launched."""

from __future__ import annotations

from importlib.util import find_spec

# By the names they are imported by; the extra ``page`` has them.
_NEEDED = {"jinja2": "jinja2", "vl_convert": "vl-convert-python"}


def missing() -> str:
    """What is not installed of what a page takes, and what installs it, in a line; imports nothing of it."""
    names = [name for module, name in _NEEDED.items() if find_spec(module) is None]
    if not names:
        return ""
    are = "is" if len(names) == 1 else "are"
    return f"a page takes {' and '.join(names)}, which {are} not installed; pip install 'pytest-llmperf[page]'"
