"""Panel: observations by series and unit, as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, TypeAlias

from pytest_llmperf.judge.gpu_effects.observation import Observation, Unit

#: One of NumPy, which counts as Any.
Array: TypeAlias = Any


#: What an effect is made of.
COMPONENTS = ("host", "device", "day")


@dataclass(frozen=True)
class Panel:
    """Cells: of each series on each of its units the mean of its observations, stored ones apart from a run's own."""

    stored: Sequence[Observation]
    seen: Sequence[Observation] = ()
    """By the run itself."""

    @cached_property
    def units(self) -> list[Unit]:
        return list(dict.fromkeys(each.unit for each in (*self.stored, *self.seen)))

    @cached_property
    def unit_index(self) -> dict[Unit, int]:
        return {unit: number for number, unit in enumerate(self.units)}

    @cached_property
    def series(self) -> list[str]:
        return list(dict.fromkeys(each.series for each in (*self.stored, *self.seen)))

    @cached_property
    def cells(self) -> list[list[Observation]]:
        groups: dict[tuple[bool, str, Unit], list[Observation]] = {}
        for is_seen, observations in ((False, self.stored), (True, self.seen)):
            for each in observations:
                groups.setdefault((is_seen, each.series, each.unit), []).append(each)
        return list(groups.values())

    @cached_property
    def may_have_changed(self) -> Array:
        """Of each cell whether it is of a case that the run itself has launched."""
        import numpy as np  # noqa: PLC0415 - only a judged case pays for it

        own = {id(each) for each in self.seen}
        return np.array([id(cell[0]) in own and not cell[0].is_calibration for cell in self.cells], dtype=bool)

    @cached_property
    def of_series(self) -> Array:
        """Of each cell the index of its series."""
        import numpy as np  # noqa: PLC0415

        index = {name: number for number, name in enumerate(self.series)}
        return np.array([index[cell[0].series] for cell in self.cells], dtype=int)

    @cached_property
    def of_unit(self) -> Array:
        """Of each cell the index of its unit."""
        import numpy as np  # noqa: PLC0415

        return np.array([self.unit_index[cell[0].unit] for cell in self.cells], dtype=int)

    @cached_property
    def logs(self) -> Array:
        """Of each cell the mean of its logarithms."""
        import numpy as np  # noqa: PLC0415

        return np.array([sum(each.log for each in cell) / len(cell) for cell in self.cells])

    @cached_property
    def sizes(self) -> Array:
        """Observations of each cell."""
        import numpy as np  # noqa: PLC0415

        return np.array([len(cell) for cell in self.cells], dtype=float)

    @cached_property
    def squared_errors(self) -> Array:
        """Of each cell the mean squared error of its observations."""
        import numpy as np  # noqa: PLC0415

        return np.array([sum(each.error**2 for each in cell) / len(cell) for cell in self.cells])


def incidence(units: Sequence[Unit]) -> dict[str, Array]:
    """For each component of an effect, which share of each unit is of which host, device, and device on a day.

    Of several GPUs the effect is their mean: by how much the slowest of them lies above it is the case's own.
    """
    import numpy as np  # noqa: PLC0415

    found: dict[str, Array] = {}
    for component, parts in (
        ("host", _hosts(units)),
        ("device", [list(unit.devices) for unit in units]),
        ("day", [[f"{device} on {unit.day}" for device in unit.devices] for unit in units]),
    ):
        index = {name: number for number, name in enumerate(dict.fromkeys(chain.from_iterable(parts)))}
        matrix = np.zeros((len(units), len(index)))
        for row, names in enumerate(parts):
            for name in names:
                matrix[row, index[name]] += 1 / len(names)
        found[component] = matrix
    return found


def _hosts(units: Sequence[Unit]) -> list[list[str]]:
    """Of each device of each unit: the very GPU is in one host, whatever that calls itself after a reboot."""
    of_device: dict[str, str] = {}
    of_name: dict[str, str] = {}
    found = []
    for unit in units:
        names = []
        for device, name in zip(unit.devices, unit.hosts, strict=True):
            host = of_device.get(device, of_name.get(name, name))
            of_device.setdefault(device, host)
            of_name.setdefault(name, host)
            names.append(host)
        found.append(names)
    return found
