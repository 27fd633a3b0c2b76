"""Metrics of `GET /metrics`, for Prometheus: vLLM's names with the prefix `pace:`, or another prefix."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from pace.llm.engine.engine import Engine
from pace.llm.generator import Generator
from pace.llm.sequence import Sequence
from pace.server.admission import Admission
from pace.server.models.merged import Families, merged

CONTENT_TYPE = CONTENT_TYPE_LATEST

SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
"""Seconds per token."""
LONG = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
"""Seconds per request, or per part of one."""
SIZES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
"""Numbers of tokens."""


class Watched(Protocol):
    """Source of the gauges; its fields are None before a model is loaded."""

    generator: Generator | None
    admission: Admission | None


class _Page:
    """Metrics of one registry, whose names have a prefix."""

    def __init__(self, prefix: str) -> None:
        self.registry = CollectorRegistry()
        self._prefix = prefix

    def _counter(self, name: str, what: str, *labels: str) -> Counter:
        return Counter(f"{self._prefix}:{name}", what, labels, registry=self.registry)

    def _histogram(self, name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"{self._prefix}:{name}", what, buckets=buckets, registry=self.registry)


class ServerMetrics(_Page):
    """Counters of a server. Called only on the event loop."""

    def __init__(self, prefix: str) -> None:
        super().__init__(prefix)
        self._http = self._counter("http_requests", "Requests answered", "route", "status")
        self._rejected = self._counter("rejected", "Requests turned away for lack of room, by reason", "why")
        self._gone = self._counter("client_gone", "Clients that left before their answer was complete")

    def answered(self, route: str, status: int) -> None:
        """Counts the status of an answer."""
        self._http.labels(route, str(status)).inc()

    def client_gone(self) -> None:
        self._gone.inc()

    def rejected(self, why: str) -> None:
        self._rejected.labels(why).inc()

    def render(self, models: Mapping[str, CollectorRegistry]) -> bytes:
        """Returns the page, in Prometheus's text format, with the registries of the models by name. If there are
        several, their metrics have the label `model_name`, as in vLLM."""
        if len(models) == 1:
            return b"".join(map(generate_latest, (self.registry, *models.values())))
        families = merged("model_name", {name: registry.collect() for name, registry in models.items()})
        return generate_latest(self.registry) + generate_latest(Families(families))


class Metrics(_Page):
    """Counters of one model. Called only on the event loop."""

    def __init__(self, prefix: str, service: Watched) -> None:
        super().__init__(prefix)
        self._service = service
        self._gauges()
        self._success = self._counter("request_success", "Choices that ended, by reason", "finished_reason")
        self._prompt = self._counter("prompt_tokens", "Tokens of prompts")
        self._generated = self._counter("generation_tokens", "Tokens generated")
        self._queries = self._counter("prefix_cache_queries", "Tokens looked up in the prefix cache")
        self._hits = self._counter("prefix_cache_hits", "Tokens found in the prefix cache")
        self._preemptions = self._counter("num_preemptions", "Times that a sequence gave way to others")
        self._drafted = self._counter("spec_decode_num_draft_tokens", "Tokens drafted")
        self._accepted = self._counter("spec_decode_num_accepted_tokens", "Drafted tokens that were kept")
        self._first = self._histogram("time_to_first_token_seconds", "From submission to the first token", LONG)
        self._each = self._histogram("request_time_per_output_token_seconds", "After the first, on average", SHORT)
        self._whole = self._histogram("e2e_request_latency_seconds", "From submission to the end", LONG)
        self._queue = self._histogram("request_queue_time_seconds", "From submission to a place in the steps", LONG)
        self._prefill = self._histogram("request_prefill_time_seconds", "From there to the first token", LONG)
        self._decode = self._histogram("request_decode_time_seconds", "From the first token to the end", LONG)
        self._prompt_sizes = self._histogram("request_prompt_tokens", "Tokens of a prompt", SIZES)
        self._sizes = self._histogram("request_generation_tokens", "Tokens generated for a choice", SIZES)

    def ended(self, samples: Iterable[list[Sequence]]) -> None:
        """Counts the sequences of an answer, after they have left the engine or were cancelled."""
        for group in samples:
            self._prompt.inc(group[0].num_prompt_tokens)
            self._prompt_sizes.observe(group[0].num_prompt_tokens)
            self._queries.inc(group[0].num_prompt_tokens)
            self._hits.inc(group[0].stats.num_reused)
            for sequence in group:
                self._count(sequence)

    # ------------------------------------------------------------------------------------------------------------------

    def _count(self, sequence: Sequence) -> None:
        times, num_generated = sequence.stats, sequence.num_generated
        self._success.labels(sequence.finish_reason or "cancelled").inc()
        self._generated.inc(num_generated)
        self._sizes.observe(num_generated)
        self._preemptions.inc(times.num_preemptions)
        self._drafted.inc(times.num_drafted)
        self._accepted.inc(times.num_accepted)
        end = times.finished or time.perf_counter()
        self._whole.observe(end - times.submitted)
        if times.admitted is not None:
            self._queue.observe(times.admitted - times.submitted)
        if times.first_token is None:
            return
        self._first.observe(times.first_token - times.submitted)
        self._prefill.observe(times.first_token - (times.admitted or times.submitted))
        self._decode.observe(end - times.first_token)
        if num_generated > 1:
            self._each.observe((end - times.first_token) / (num_generated - 1))

    def _gauges(self) -> None:
        service = self._service

        def gauge(
            name: str, what: str, read: Callable[[Engine], float], others: Callable[[], float] = lambda: 0.0
        ) -> None:
            """Adds a gauge of the engine, 0 without one, plus `others`."""

            def value() -> float:
                try:
                    return others() + (0.0 if service.generator is None else read(service.generator.engine))
                except (RuntimeError, ValueError):  # it has ended
                    return others()

            Gauge(f"{self._prefix}:{name}", what, registry=self.registry).set_function(value)

        gauge("num_requests_running", "Sequences in the steps", lambda engine: len(engine.scheduler.running))
        gauge(
            "kv_cache_usage_perc",
            "Part of the cache that sequences hold, 0 to 1",
            lambda engine: engine.cache.used_bytes / max(1, engine.cache.budget_bytes),
        )
        gauge(
            "num_requests_waiting",
            "Requests and sequences that wait for a place",
            lambda engine: len(engine.scheduler.waiting),
            lambda: service.admission.num_waiting if service.admission else 0,
        )
