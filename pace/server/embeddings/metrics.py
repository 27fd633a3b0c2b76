"""Metrics of a model of vectors and scores: the names of a generating model, where they mean the same."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from pace.server.metrics import LONG, SIZES


class EncodingMetrics:
    """Counters of one model, in a registry of their own. Called only on the event loop."""

    def __init__(self, prefix: str, num_running: Callable[[], float], num_waiting: Callable[[], float]) -> None:
        self.registry = CollectorRegistry()
        counter = lambda name, what: Counter(f"{prefix}:{name}", what, registry=self.registry)
        histogram = lambda name, what, buckets: Histogram(
            f"{prefix}:{name}", what, buckets=buckets, registry=self.registry
        )
        self._texts = counter("encoded_texts", "Texts that were encoded")
        self._tokens = counter("prompt_tokens", "Tokens of prompts")
        self._sizes = histogram("request_prompt_tokens", "Tokens of a prompt", SIZES)
        self._seconds = histogram("e2e_request_latency_seconds", "From submission to the end", LONG)
        for name, what, read in (
            ("num_requests_running", "Texts of requests in the steps", num_running),
            ("num_requests_waiting", "Requests and sequences that wait for a place", num_waiting),
        ):
            Gauge(f"{prefix}:{name}", what, registry=self.registry).set_function(read)

    def ended(self, num_tokens: list[int], seconds: float) -> None:
        """Counts the texts of an answered request. `num_tokens` has the tokens of each."""
        self._texts.inc(len(num_tokens))
        self._tokens.inc(sum(num_tokens))
        self._seconds.observe(seconds)
        for size in num_tokens:
            self._sizes.observe(size)
