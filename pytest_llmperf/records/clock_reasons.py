"""Why a GPU's clocks are lower than they could be, by NVML's bits."""

from __future__ import annotations

#: What a chip does by design (idle, its power limit) is there too.
CLOCK_REASONS = {
    0x01: "idle",
    0x02: "application clocks",
    0x04: "power limit",
    0x08: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
    0x100: "display clocks",
}

#: Clocks lowered for one of these reasons say something of the room or the board, nothing of the software. The power
#: limit is not among them: a chip that works at full speed lives there.
THROTTLES = frozenset(
    {"hardware slowdown", "software thermal slowdown", "hardware thermal slowdown", "hardware power brake"}
)
