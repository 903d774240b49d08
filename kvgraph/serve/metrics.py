"""Prometheus metrics under vLLM's names and buckets, so that dashboards for it work."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from kvgraph.runtime.stats import EngineStats, RequestStats
from kvgraph.serve.facts import EngineFacts

TIME_TO_FIRST_TOKEN = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40,
    80, 160, 640, 2560,
)  # fmt: skip
INTER_TOKEN = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
REQUEST = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip

SECONDS = {
    "time_to_first_token_seconds": TIME_TO_FIRST_TOKEN,
    "inter_token_latency_seconds": INTER_TOKEN,
    "e2e_request_latency_seconds": REQUEST,
    "request_queue_time_seconds": REQUEST,
    "request_prefill_time_seconds": REQUEST,
    "request_decode_time_seconds": REQUEST,
}
"""Upper bounds in seconds of each histogram of times, by its name without the prefix."""

TOKENS = (
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_max_num_generation_tokens",
)
"""Names of the histograms of tokens."""


def token_bounds(longest: int) -> list[int]:
    """1, 2, 5, 10, 20, 50 and so on, up to `longest`."""
    powers = [10**exponent for exponent in range(len(str(longest)))]
    return [digit * ten for ten in powers for digit in (1, 2, 5) if digit * ten <= longest]


class Buckets:
    """Counts of a histogram. An observation costs one bisection, as each token is observed."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float | None, count: int = 1) -> None:
        """Add `count` observations of `value` each; nothing if `value` is None."""
        if value is not None:
            self._counts[bisect_left(self._bounds, value)] += count
            self._sum += value * count

    def metric(self, name: str, model: str) -> HistogramMetricFamily:
        metric = HistogramMetricFamily(
            name, name.rpartition(":")[2].replace("_", " "), labels=["model_name"]
        )
        upto = [*map(floatToGoString, self._bounds), "+Inf"]
        pairs = list(zip(upto, accumulate(self._counts), strict=True))
        metric.add_metric([model], pairs, self._sum)
        return metric


class Metrics(Collector):
    """Metrics of one server, named `<prefix><name>{model_name="..."}`."""

    def __init__(
        self, prefix: str, model: str, facts: EngineFacts, stats: Callable[[], EngineStats]
    ) -> None:
        self._prefix = prefix
        self._model = model
        tokens = dict.fromkeys(TOKENS, token_bounds(facts.longest))
        self._buckets = {name: Buckets(bounds) for name, bounds in (SECONDS | tokens).items()}
        self._between = self._buckets["inter_token_latency_seconds"]
        self._prompt_tokens = self._generation_tokens = 0
        self._ended = dict.fromkeys(("stop", "length", "error", "abort"), 0)
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._registry.register(_EngineCollector(prefix, model, facts, stats))

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def submitted(self, prompt_tokens: int) -> None:
        self._prompt_tokens += prompt_tokens

    def first_tokens(self, stats: RequestStats, count: int, seconds: float) -> None:
        """Count the first `count` tokens of a request; `seconds`: from the first to the last."""
        self._buckets["time_to_first_token_seconds"].observe(stats.first_token_seconds)
        self._buckets["request_queue_time_seconds"].observe(stats.queue_seconds)
        self._buckets["request_prefill_time_seconds"].observe(stats.prefill_seconds)
        if count:
            self._generation_tokens += 1
            self.next_tokens(count - 1, seconds)

    def next_tokens(self, count: int, seconds: float) -> None:
        """Count `count` tokens of a request, which came `seconds` after the previous ones."""
        if count:
            self._generation_tokens += count
            self._between.observe(seconds / count, count)

    def ended(self, stats: RequestStats, reason: str, generated: int) -> None:
        """Count a choice that has ended, with `generated` tokens."""
        self._buckets["e2e_request_latency_seconds"].observe(stats.total_seconds)
        self._buckets["request_decode_time_seconds"].observe(stats.decode_seconds)
        self._buckets["request_prompt_tokens"].observe(stats.prompt_tokens)
        self._buckets["request_generation_tokens"].observe(generated)
        self._ended[reason] += 1

    def all_ended(self, longest: int) -> None:
        """Count a prompt whose choices have all ended, with at most `longest` tokens each."""
        self._buckets["request_max_num_generation_tokens"].observe(longest)

    def collect(self) -> Iterator[Metric]:
        for name, buckets in self._buckets.items():
            yield buckets.metric(f"{self._prefix}{name}", self._model)
        for name, text, value in (
            ("prompt_tokens", "Tokens of prompts", self._prompt_tokens),
            ("generation_tokens", "Tokens that were generated", self._generation_tokens),
        ):
            counter = CounterMetricFamily(f"{self._prefix}{name}", text, labels=["model_name"])
            counter.add_metric([self._model], value)
            yield counter
        success = CounterMetricFamily(
            f"{self._prefix}request_success",
            "Requests that ended, by their reason",
            labels=["model_name", "finished_reason"],
        )
        for reason, value in self._ended.items():
            success.add_metric([self._model, reason], value)
        yield success


class _EngineCollector(Collector):
    """Metrics of the engine's last measurement, read on request."""

    def __init__(
        self, prefix: str, model: str, facts: EngineFacts, stats: Callable[[], EngineStats]
    ) -> None:
        self._prefix = prefix
        self._model = model
        self._stats = stats
        self._config = {
            "block_size": str(facts.page_size),
            "num_gpu_blocks": str(facts.num_pages),
            "enable_prefix_caching": str(facts.prefix_caching),
        }

    def collect(self) -> Iterator[Metric]:
        now = self._stats()
        gauge, counter = GaugeMetricFamily, CounterMetricFamily
        for kind, name, text, value in (
            (gauge, "num_requests_running", "Requests in the batch", now.num_running),
            (gauge, "num_requests_waiting", "Requests in the queue", now.num_waiting),
            (gauge, "kv_cache_usage_perc", "Share of the pages that requests hold", now.page_usage),
            (
                counter,
                "prefix_cache_queries",
                "Tokens of prompts that were looked up",
                now.prompt_tokens,
            ),
            (counter, "prefix_cache_hits", "Tokens of them that were cached", now.cached_tokens),
            (counter, "num_preemptions", "Requests that gave up their pages", now.num_preemptions),
        ):
            metric = kind(f"{self._prefix}{name}", text, labels=["model_name"])
            metric.add_metric([self._model], value)
            yield metric
        config = GaugeMetricFamily(
            f"{self._prefix}cache_config_info", "The cache", labels=[*self._config, "model_name"]
        )
        config.add_metric([*self._config.values(), self._model], 1)
        yield config
