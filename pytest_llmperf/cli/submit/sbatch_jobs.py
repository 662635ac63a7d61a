"""The jobs of a night, as a cluster file says them, and what they may cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pytest_llmperf.cli.command_error import ClusterError
from pytest_llmperf.cli.submit.cluster_file import ClusterFile


@dataclass(frozen=True, kw_only=True)
class Job:
    """One sbatch: the widths it runs, or the tasks of its array."""

    widths: tuple[int, ...]
    nodes: int
    is_array: bool
    gpu_hours: float
    """At most, of a start of all its tasks: every GPU of every node until the time limit; 0: no GPU, or no limit."""

    @property
    def title(self) -> str:
        widths = " ".join(map(str, self.widths))
        how = "each a task of an array" if self.is_array else "one after the other"
        cost = f": at most {self.gpu_hours:.1f} GPU-hours a start" if self.gpu_hours else ""
        return f"{widths} GPU(s) on {self.nodes} node(s), {how}{cost}"


def jobs(cluster: ClusterFile) -> list[Job]:
    """What one night submits, the widest first."""
    per_node = cluster.count("cluster", "gpus_per_node")
    is_free = cluster.text("cluster", "on_cpu") == "yes" or cluster.is_local
    each = 0.0 if is_free else per_node * cluster.hours
    widths = cluster.widths
    if cluster.text("suite", "mode") == "packed" or cluster.is_local:
        nodes = _nodes(widths[0], per_node)
        return [Job(widths=tuple(widths), nodes=nodes, is_array=False, gpu_hours=nodes * each)]
    # All tasks of an array have the same number of nodes, and the same options.
    alike: dict[tuple[int, str], list[int]] = {}
    for width in widths:
        alike.setdefault((_nodes(width, per_node), str(cluster.at(width).values["sbatch"])), []).append(width)
    return [
        Job(widths=tuple(same), nodes=nodes, is_array=True, gpu_hours=len(same) * nodes * hours)
        for (nodes, _), same in alike.items()
        for hours in [0.0 if is_free else per_node * cluster.at(same[0]).hours]
    ]


def check_budget(cluster: ClusterFile, planned: Sequence[Job]) -> None:
    """Refuse what may cost more than the file allows.

    Raises:
        ClusterError: it may.
    """
    total, budget = sum(job.gpu_hours for job in planned), cluster.budget
    if budget is not None and total > budget:
        raise ClusterError(
            f"{cluster.path}: not submitted, a start may cost {total:.1f} GPU-hours, budget_gpu_hours = {budget:g}; "
            "lower [sbatch] time or [suite] gpus, or raise the budget"
        )


def cost(cluster: ClusterFile, planned: Sequence[Job]) -> str:
    """What the night may cost, as far as anything bounds it."""
    if cluster.text("cluster", "on_cpu") == "yes":
        return "no GPU-hours, on_cpu = yes"
    if cluster.is_local:
        return "no bound of GPU-hours: without SLURM nothing ends the run"
    total, budget, restarts = sum(job.gpu_hours for job in planned), cluster.budget, cluster.restarts
    if budget is not None:
        return f"at most {total:.1f} GPU-hours a start, {budget:g} in all starts (budget_gpu_hours)"
    again = f" a start, {total * (1 + restarts):.1f} in all starts (max_restarts = {restarts})" if restarts else ""
    return f"at most {total:.1f} GPU-hours{again}"


def shares(cluster: ClusterFile, planned: Sequence[Job]) -> list[float | None]:
    """GPU-hours that a task of each job may spend in all its starts together; ``None``: whatever it takes."""
    total, budget = sum(job.gpu_hours for job in planned), cluster.budget
    if budget is None or not total:
        return [None for _ in planned]
    # Alike within an array, not by width: its narrow tasks hold as many nodes and GPUs as its wide ones.
    return [budget * job.gpu_hours / total / (len(job.widths) if job.is_array else 1) for job in planned]


def _nodes(width: int, per_node: int) -> int:
    return -(-width // per_node)
