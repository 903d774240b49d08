"""Prometheus metrics under vLLM's names and buckets, so that dashboards for it work."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvgraph.runtime.engine import Engine
from kvgraph.runtime.stats import EngineStats, RequestStats

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

HISTOGRAMS = {
    "time_to_first_token_seconds": TIME_TO_FIRST_TOKEN,
    "inter_token_latency_seconds": INTER_TOKEN,
    "e2e_request_latency_seconds": REQUEST,
    "request_queue_time_seconds": REQUEST,
    "request_prefill_time_seconds": REQUEST,
    "request_decode_time_seconds": REQUEST,
}
"""Name behind the prefix -> upper bounds in seconds."""


class Metrics:
    """Counts of one server. The names are `<prefix><name>{model_name="..."}`."""

    def __init__(
        self, prefix: str, model: str, engine: Engine, stats: Callable[[], EngineStats]
    ) -> None:
        self._registry = CollectorRegistry()
        self._seconds = {
            name: Histogram(
                f"{prefix}{name}",
                name.replace("_", " "),
                ["model_name"],
                buckets=bounds,
                registry=self._registry,
            ).labels(model)
            for name, bounds in HISTOGRAMS.items()
        }
        self._prompt_tokens, self._generation_tokens = (
            Counter(f"{prefix}{name}", text, ["model_name"], registry=self._registry).labels(model)
            for name, text in (
                ("prompt_tokens", "Tokens of prompts"),
                ("generation_tokens", "Tokens that were generated"),
            )
        )
        self._success = Counter(
            f"{prefix}request_success",
            "Requests that ended, by their reason",
            ["model_name", "finished_reason"],
            registry=self._registry,
        )
        self._model = model
        self._registry.register(_EngineCollector(prefix, model, engine, stats))

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def submitted(self, prompt_tokens: int) -> None:
        self._prompt_tokens.inc(prompt_tokens)

    def first_token(self, stats: RequestStats, count: int) -> None:
        self._observe("time_to_first_token_seconds", stats.first_token_seconds)
        self._observe("request_queue_time_seconds", stats.queue_seconds)
        self._observe("request_prefill_time_seconds", stats.prefill_seconds)
        self._generation_tokens.inc(count)

    def next_tokens(self, count: int, seconds: float) -> None:
        """`count` tokens of one request came, `seconds` after those before them."""
        self._generation_tokens.inc(count)
        for _ in range(count):
            self._seconds["inter_token_latency_seconds"].observe(seconds / count)

    def ended(self, stats: RequestStats, reason: str) -> None:
        self._observe("e2e_request_latency_seconds", stats.total_seconds)
        self._observe("request_decode_time_seconds", stats.decode_seconds)
        self._success.labels(self._model, reason).inc()

    def _observe(self, name: str, seconds: float | None) -> None:
        if seconds is not None:
            self._seconds[name].observe(seconds)


class _EngineCollector(Collector):
    """What the engine's last snapshot says, read when somebody asks."""

    def __init__(
        self, prefix: str, model: str, engine: Engine, stats: Callable[[], EngineStats]
    ) -> None:
        self._prefix = prefix
        self._model = model
        self._stats = stats
        params = engine.kv.params
        self._config = {
            "block_size": str(params.page_size),
            "num_gpu_blocks": str(stats().num_pages),
            "enable_prefix_caching": str(params.enable_prefix_caching),
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
