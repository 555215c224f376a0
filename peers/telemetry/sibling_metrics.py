"""What /metrics answers of a process that holds several stages: all series of each, labelled."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from peers.telemetry.metric_kinds import PREFIX
from peers.telemetry.metrics import Metrics

LABEL = "stage"


class _Together(Collector):
    """The families of several registries, each once."""

    def __init__(self, several: Sequence[tuple[Metrics, str]]) -> None:
        """With the stage of each; empty: not known."""
        self.several = several

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for metrics, stage in self.several:
            for found in metrics.registry.collect():
                family = families.get(found.name)
                if family is None:
                    family = families[found.name] = Metric(found.name, found.documentation, found.type)
                family.samples += _labelled(found, stage)
        return families.values()


def _labelled(found: Metric, stage: str) -> Iterator[Sample]:
    """What is known of the process itself has no stage."""
    own = found.name.startswith(PREFIX) and stage != ""
    for sample in found.samples:
        yield sample._replace(labels={**sample.labels, LABEL: stage}) if own else sample


def text_of_all(several: Sequence[Metrics], stages: range | None) -> bytes:
    """In Prometheus' text format. Before the stages are known only what the first peer has: series without a
    stage, as a peer of one stage serves them."""
    known = [(several[0], "")] if stages is None else list(zip(several, map(str, stages), strict=True))
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Together(known))
    return generate_latest(registry)
