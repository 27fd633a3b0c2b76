"""Merges the metrics of several replicas into one page, with the replica's name as a label."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families


def joined(pages: Mapping[str, str]) -> bytes:
    """`pages`: the Prometheus page of each replica, by name."""
    families: dict[str, Metric] = {}
    for replica, page in pages.items():
        for family in text_string_to_metric_families(page):
            whole = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                whole.add_sample(sample.name, {"replica": replica, **sample.labels}, sample.value)
    return generate_latest(_Collected(families.values()))


class _Collected:
    """A minimal Prometheus registry."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families
