"""Case: what is concluded as one: a spec, two that take turns, or the largest micro-batch of one."""

from __future__ import annotations

from dataclasses import dataclass

from pytest_llmperf.settings.train_spec import TrainSpec


@dataclass(frozen=True, kw_only=True)
class Case:
    """Its name, its identity and what it launches."""

    id: str
    digest: str
    specs: tuple[TrainSpec, ...]
    baselines: tuple[str, ...]
    """Digests of the baselines that are in use by it."""
    needs_memory_limit: bool = False
    """Whether it has to run out of memory to be decided."""
    judges: bool = True
    """Whether it is judged; launches alone are what ``perf.measure`` returns."""
    notes: tuple[str, ...] = ()
    """What every result of it says."""

    @property
    def width(self) -> int:
        """GPUs, or ranks on the CPU, of its widest spec."""
        return max(spec.gpus for spec in self.specs)

    def spec(self, spec_id: str) -> TrainSpec:
        """The one of this id; the last where a launch had another: sizes that are searched have their own."""
        return next((spec for spec in self.specs if spec.id == spec_id), self.specs[-1])

    @classmethod
    def of(cls, spec: TrainSpec, *, judges: bool = True) -> Case:
        """One spec against its baseline, or another environment; or its launches alone."""
        return cls(id=spec.id, digest=spec.digest, specs=(spec,), baselines=(spec.digest,), judges=judges)

    @classmethod
    def compared(cls, before: TrainSpec, after: TrainSpec, *notes: str) -> Case:
        """Two that take turns."""
        return cls(
            id=f"{after.id}-over-{before.id}",
            digest=f"{after.digest}-{before.digest}",
            specs=(before, after),
            baselines=(before.digest, after.digest),
            notes=notes,
        )

    @classmethod
    def largest_batch(cls, spec: TrainSpec) -> Case:
        """The largest micro-batch of ``spec``."""
        return cls(
            id=spec.capacity_id,
            digest=spec.capacity_digest,
            specs=(spec,),
            baselines=(spec.capacity_digest,),
            needs_memory_limit=True,
        )
