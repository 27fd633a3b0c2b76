"""Merges the metrics of several models or replicas: their names become a label."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import Metric


class Families:
    """A minimal registry of Prometheus."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def merged(label: str, sources: Mapping[str, Iterable[Metric]]) -> list[Metric]:
    """Returns the metrics of several sources, whose names become a label."""
    families: dict[str, Metric] = {}
    for name, metrics in sources.items():
        for family in metrics:
            whole = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                whole.add_sample(sample.name, {label: name, **sample.labels}, sample.value)
    return list(families.values())
