"""Injected faults at work: a share of each step burnt, memory held, a rank that hangs. The gate's own test."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import torch

from pytest_llmperf.spec.fault_injection import Injection

# Steps to learn the step time from; all of them warm-up.
_LEARN_FROM, _LEARN_TO = 1, 3

# Burnt by matrix products and not by waiting: a chip at its power limit turns a wait into higher clocks, and an 8 %
# wait was seen to cost 6 %.
_SIDE, _TRIAL_PRODUCTS = 4096, 100


class Burner:
    """Burns a share of each step on ``device``, called at a step's end."""

    def __init__(self, injection: Injection, device: torch.device, clock: Any) -> None:
        self._share, self._device, self._clock = injection.slow, device, clock
        self._hang = injection.hang
        self._held = torch.zeros(injection.hold, dtype=torch.uint8, device=device) if injection.hold else None
        self._seconds, self._products = 0.0, 0
        self._matrix = torch.empty(0)

    def step(self, step: int) -> None:
        if step == self._hang:
            _hang()
        if step == _LEARN_TO and self._share:
            self._learn()
        if self._products:
            self._multiply(self._products)
        elif self._seconds:
            end = time.perf_counter() + self._seconds
            while time.perf_counter() < end:
                pass

    def _learn(self) -> None:
        cuda = self._device.type == "cuda"
        if cuda:
            torch.cuda.synchronize()
        seconds = self._share * median(self._clock.so_far()[_LEARN_FROM:])
        if not cuda:
            self._seconds = seconds
            return
        self._matrix = torch.randn(_SIDE, _SIDE, dtype=torch.bfloat16, device=self._device)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        self._multiply(_TRIAL_PRODUCTS)
        end.record()
        torch.cuda.synchronize()
        self._products = round(seconds * _TRIAL_PRODUCTS / (start.elapsed_time(end) / 1000))

    def _multiply(self, times: int) -> None:
        for _ in range(times):
            torch.matmul(self._matrix, self._matrix)


def _hang() -> None:
    """As a rank that waits for something that never comes; a signal's handler still runs."""
    while True:
        time.sleep(1)
