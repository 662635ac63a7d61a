"""What every test folder shares. The plugin itself comes from its entry point: named here too, it would load twice."""

from __future__ import annotations

pytest_plugins = ["pytester"]
