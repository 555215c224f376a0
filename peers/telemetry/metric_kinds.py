"""Declare Prometheus metrics: once each, with all their series, and listed for the documentation.

A series is a metric with one value for each of its labels. A family is a metric with all its series."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import nan
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client import Metric as Family
from prometheus_client.registry import Collector

Metric = TypeVar("Metric")

PREFIX = "swarmnet_"

FAST = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Histogram bounds in seconds for one compute operation, from a tiny stage on a CPU upwards."""

ROUNDS = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 16.0)
"""Histogram bounds in rounds."""

SLOW = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
"""Histogram bounds in seconds for work over the internet or on disk."""


@dataclass(frozen=True, slots=True)
class Label:
    """A label and all its values; no values means any value that this peer chooses itself."""

    name: str
    values: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Declared:
    """One metric as the documentation shows it."""

    name: str
    kind: str
    labels: tuple[Label, ...]
    help: str


class LabelledMetric(Generic[Metric]):
    """A metric with labels: `family("activation").inc(5)`. Unknown values become `other`."""

    def __init__(self, child: Callable[..., Metric], labels: Sequence[Label]) -> None:
        self._child = child
        self._labels = labels
        self._children: dict[tuple[str, ...], Metric] = {}
        if all(label.values for label in labels):
            for values in itertools.product(*(label.values for label in labels)):
                self._children[values] = child(*values)

    def __call__(self, *values: str) -> Metric:
        child = self._children.get(values)
        return child if child is not None else self._child_with_other(values)

    def _child_with_other(self, values: tuple[str, ...]) -> Metric:
        """Return the series for label values that have none yet. Values that a label does not list become
        `other`; a label with an empty list allows all. Raises TypeError if the number of values is wrong."""
        if len(values) != len(self._labels):
            raise TypeError(f"expected {[label.name for label in self._labels]}, got {values}")
        known = tuple(
            value if not label.values or value in label.values else "other"
            for label, value in zip(self._labels, values, strict=True)
        )
        return self._child(*known)


def only(family: LabelledMetric[Gauge], values: Iterable[str], value: str) -> None:
    """Set a family with one label to 1 for `value` and to 0 for all other `values`."""
    for label_value in values:
        family(label_value).set(label_value == value)


class Declare:
    """Creates metrics in one registry and lists what was declared."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.declared: list[Declared] = []

    def _register(self, name: str, kind: str, help: str, labels: Sequence[Label] = ()) -> str:
        self.declared.append(Declared(PREFIX + name, kind, tuple(labels), help))
        return PREFIX + name

    def counter(self, name: str, help: str) -> Counter:
        return Counter(self._register(name, "counter", help), help, registry=self.registry)

    def gauge(self, name: str, help: str) -> Gauge:
        return Gauge(self._register(name, "gauge", help), help, registry=self.registry)

    def histogram(self, name: str, help: str, bounds: Sequence[float]) -> Histogram:
        name = self._register(name, "histogram", help)
        return Histogram(name, help, buckets=bounds, registry=self.registry)

    def counters(self, name: str, help: str, *labels: Label) -> LabelledMetric[Counter]:
        name = self._register(name, "counter", help, labels)
        metric = Counter(name, help, [label.name for label in labels], registry=self.registry)
        return LabelledMetric(metric.labels, labels)

    def gauges(self, name: str, help: str, *labels: Label) -> LabelledMetric[Gauge]:
        name = self._register(name, "gauge", help, labels)
        metric = Gauge(name, help, [label.name for label in labels], registry=self.registry)
        return LabelledMetric(metric.labels, labels)

    def histograms(
        self, name: str, help: str, bounds: Sequence[float], *labels: Label
    ) -> LabelledMetric[Histogram]:
        name = self._register(name, "histogram", help, labels)
        names = [label.name for label in labels]
        metric = Histogram(name, help, names, buckets=bounds, registry=self.registry)
        return LabelledMetric(metric.labels, labels)


class OptionalGauges:
    """Gauges that appear with their first value: an unknown one has no series instead of a false 0."""

    def __init__(self, declare: Declare, helps: Mapping[str, str]) -> None:
        """`helps` maps the gauges' names to their help texts."""
        self._declare = declare
        self._helps = helps
        self._gauges: dict[str, Gauge] = {}

    def set(self, name: str, value: float | None) -> None:
        """Set a gauge; None means that the value is unknown, or no longer known."""
        if value is not None and name not in self._gauges:
            self.show(name)
        if name in self._gauges:
            self._gauges[name].set(value if value is not None else nan)

    def show(self, *names: str) -> None:
        """Create these gauges now, or all if none is named. Existing ones stay unchanged."""
        for name in names or self._helps:
            if name not in self._gauges:
                self._gauges[name] = self._declare.gauge(name, self._helps[name])


class WithLabel(Collector):
    """The metrics of a registry, each series with one more label."""

    def __init__(self, registry: CollectorRegistry, name: str, value: str) -> None:
        self._registry = registry
        self._label = {name: value}

    def collect(self) -> Iterator[Family]:
        """Yield every family; the registry makes new ones at each call, so that they can be changed."""
        for family in self._registry.collect():
            family.samples = [
                sample._replace(labels={**self._label, **sample.labels}) for sample in family.samples
            ]
            yield family


def table(declared: Iterable[Declared]) -> Iterator[str]:
    """Yield the lines of a Markdown table of these metrics, for docs/metrics.md."""
    yield "| metric | type | labels | meaning, unit |"
    yield "|---|---|---|---|"
    for metric in declared:
        labels = "; ".join(f"`{label.name}`{_listed_values(label)}" for label in metric.labels)
        yield f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help} |"


def _listed_values(label: Label) -> str:
    return ": " + ", ".join(label.values) if label.values else ""
