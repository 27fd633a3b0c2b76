"""Merges the metrics of several replicas into one page, with the replica's name as a label."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from pace.server.models.merged import Families, merged


def joined(pages: Mapping[str, str]) -> bytes:
    """`pages`: the Prometheus page of each replica, by name."""
    return generate_latest(
        Families(merged("replica", {name: text_string_to_metric_families(page) for name, page in pages.items()}))
    )
