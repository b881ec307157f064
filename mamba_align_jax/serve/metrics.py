"""What a server tells Prometheus: under vLLM's names where vLLM has the metric, under ours where only a hybrid has it.

vLLM's names, labels and buckets are those of its vllm/v1/metrics/loggers.py and vllm/v1/spec_decode/metrics.py.
"""

import itertools
import time
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mamba_align_jax.engine.running.engine import Engine
from mamba_align_jax.engine.scheduling.request import RequestUpdate

_LABELS = ("model_name", "engine")
_TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TOKEN_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0),
    *(40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)


class _EngineNumbers(Collector):
    """Reads an engine's own counts whenever Prometheus asks for them."""

    def __init__(self, engine: Engine, labels: tuple[str, str]) -> None:
        self._engine, self._values = engine, labels

    def collect(self) -> Iterator[Metric]:
        engine, stats = self._engine, self._engine.stats
        # A cache that is replaced meanwhile is still whole.
        states, pages = engine.cache.states.pool, engine.cache.kv.pool
        drafts, accepted = stats.draft_tokens, stats.accepted_tokens
        share = pages.num_held / max(1, pages.num_blocks - 1)
        gauges = (
            ("vllm:num_requests_running", "Requests that run.", len(engine.scheduler.running)),
            ("vllm:num_requests_waiting", "Requests that wait.", len(engine.scheduler.waiting)),
            ("vllm:kv_cache_usage_perc", "Share of the KV pages that requests hold; 1 is all.", share),
            ("mamba_align:state_blocks", "State blocks of the pool.", states.num_blocks - 1),
            ("mamba_align:state_blocks_used", "State blocks that requests hold.", states.num_held),
            ("mamba_align:state_blocks_kept", "State blocks that are only kept for later requests.", states.num_cached),
        )
        counters = (
            ("vllm:prefix_cache_queries", "Prompt tokens that were looked up.", stats.prompt_tokens),
            ("vllm:prefix_cache_hits", "Prompt tokens that came from the cache.", stats.cached_tokens),
            ("vllm:prompt_tokens", "Tokens of prompts that began to run.", stats.prompt_tokens),
            ("vllm:num_preemptions", "How often a request was preempted.", stats.preemptions),
            # Every row with drafts has one in the first place.
            ("vllm:spec_decode_num_drafts", "Rows that verified drafts.", sum(drafts[:1])),
            ("vllm:spec_decode_num_draft_tokens", "Draft tokens that were verified.", sum(drafts)),
            ("vllm:spec_decode_num_accepted_tokens", "Draft tokens that were accepted.", sum(accepted)),
            ("mamba_align:hit_requests", "Requests that started from a cached prefix.", stats.hit_requests),
            (
                "mamba_align:state_blocks_evicted",
                "State blocks that were evicted from the cache.",
                stats.evicted_state_blocks,
            ),
            ("mamba_align:kv_pages_evicted", "KV pages that were evicted from the cache.", stats.evicted_kv_pages),
            (
                "mamba_align:state_copied_bytes",
                "Bytes of states that were copied between blocks.",
                stats.state_bytes_copied,
            ),
            ("mamba_align:steps", "Steps whose results were read.", stats.steps),
            ("mamba_align:null_reads", "Rows whose state was lost. More than 0 is a bug.", stats.null_reads),
        )
        for kind, numbers in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, text, value in numbers:
                family = kind(name, text, labels=_LABELS)
                family.add_metric(self._values, value)
                yield family
        name, text = "vllm:spec_decode_num_accepted_tokens_per_pos", "Draft tokens that were accepted, by their place."
        by_place = CounterMetricFamily(name, text, labels=(*_LABELS, "position"))
        for place, count in enumerate(accepted):
            by_place.add_metric((*self._values, str(place)), count)
        yield by_place


class Metrics:
    """The metrics of one server, in a registry of its own."""

    def __init__(self, engine: Engine, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._values = (model_name, "0")
        self._registry.register(_EngineNumbers(engine, self._values))
        text = "From a call to its first token."
        self._first = self._histogram("vllm:time_to_first_token_seconds", text, _TTFT_BUCKETS)
        text = "Between the steps that give a request tokens."
        self._between = self._histogram("vllm:inter_token_latency_seconds", text, _TOKEN_BUCKETS)
        text = "From a call to the end of each of its requests."
        self._whole = self._histogram("vllm:e2e_request_latency_seconds", text, _REQUEST_BUCKETS)
        self._generated = self._counter("vllm:generation_tokens", "Generated tokens.").labels(*self._values)
        self._ends = self._counter("vllm:request_success", "Requests by how they ended.", "finished_reason")
        text = "Requests whose prompt was not cached as far as it could have been, by the reason."
        self._misses = self._counter("mamba_align:cache_misses", text, "reason")
        text = "Calls that were refused, by their status and the code of the reason."
        self._refusals = self._counter("mamba_align:refused_calls", text, "status", "code")

    def _histogram(self, name: str, text: str, buckets: Iterable[float]) -> Histogram:
        histogram = Histogram(name, text, _LABELS, buckets=tuple(buckets), registry=self._registry)
        return histogram.labels(*self._values)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, (*_LABELS, *labels), registry=self._registry)

    def updated(self, update: RequestUpdate, called: float, *, is_first: bool, has_first_token: bool) -> None:
        """Takes note of an update of a request, whose call came at `called`, in seconds of `time.perf_counter`."""
        if is_first and update.cache_miss is not None:
            self._misses.labels(*self._values, update.cache_miss).inc()
        if has_first_token:
            self._first.observe(time.perf_counter() - called)
        self._generated.inc(len(update.token_ids))
        if update.output is not None:
            self._ends.labels(*self._values, update.output.finish_reason).inc()
            self._whole.observe(time.perf_counter() - called)
            times = sorted(set(update.output.token_times))
            for before, after in itertools.pairwise(times):
                self._between.observe(after - before)

    def refused(self, status: int, code: str | None) -> None:
        """Takes note of a call that was refused."""
        self._refusals.labels(*self._values, str(status), code or "").inc()

    def text(self) -> bytes:
        """Returns all metrics in Prometheus' text format."""
        return generate_latest(self._registry)
