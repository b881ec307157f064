"""What a server tells Prometheus: under vLLM's names where vLLM has the metric, under ours where only a hybrid has it.

vLLM's names, labels and buckets are those of its vllm/v1/metrics/loggers.py and vllm/v1/spec_decode/metrics.py.
"""

import itertools
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mamba_align_jax.engine.running.engine import Engine
from mamba_align_jax.engine.scheduling.request import RequestOutput, RequestUpdate

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
        yield self._gauge("vllm:num_requests_running", "Requests that run.", len(engine.scheduler.running))
        yield self._gauge("vllm:num_requests_waiting", "Requests that wait.", len(engine.scheduler.waiting))
        used = pages.num_held / max(1, pages.num_blocks - 1)
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of the KV pages that requests hold; 1 is all.", used)
        yield self._counter("vllm:prefix_cache_queries", "Prompt tokens that were looked up.", stats.prompt_tokens)
        yield self._counter("vllm:prefix_cache_hits", "Prompt tokens that came from the cache.", stats.cached_tokens)
        yield self._counter("vllm:prompt_tokens", "Tokens of prompts that began to run.", stats.prompt_tokens)
        yield self._counter("vllm:num_preemptions", "How often a request was preempted.", stats.preemptions)
        # Every row with drafts has one in the first place.
        drafts, accepted = stats.draft_tokens, stats.accepted_tokens
        name = "vllm:spec_decode_num_"
        yield self._counter(f"{name}drafts", "Rows that verified drafts.", drafts[0] if drafts else 0)
        yield self._counter(f"{name}draft_tokens", "Draft tokens that were verified.", sum(drafts))
        yield self._counter(f"{name}accepted_tokens", "Draft tokens that were accepted.", sum(accepted))
        name, values = f"{name}accepted_tokens_per_pos", "Draft tokens that were accepted, by their place."
        by_place = CounterMetricFamily(name, values, labels=(*_LABELS, "position"))
        for place, count in enumerate(accepted):
            by_place.add_metric((*self._values, str(place)), count)
        yield by_place
        yield from self._states(states.num_blocks - 1, states.num_held, states.num_cached)
        text = "Requests that started from a cached prefix."
        yield self._counter("mamba_align:hit_requests", text, stats.hit_requests)
        text = "State blocks that were evicted from the cache."
        yield self._counter("mamba_align:state_blocks_evicted", text, stats.evicted_state_blocks)
        text = "KV pages that were evicted from the cache."
        yield self._counter("mamba_align:kv_pages_evicted", text, stats.evicted_kv_pages)
        text = "Bytes of states that were copied between blocks."
        yield self._counter("mamba_align:state_copied_bytes", text, stats.state_bytes_copied)
        yield self._counter("mamba_align:steps", "Steps whose results were read.", stats.steps)
        text = "Rows whose state was lost. More than 0 is a bug."
        yield self._counter("mamba_align:null_reads", text, stats.null_reads)

    def _states(self, total: int, held: int, kept: int) -> Iterator[Metric]:
        yield self._gauge("mamba_align:state_blocks", "State blocks of the pool.", total)
        yield self._gauge("mamba_align:state_blocks_used", "State blocks that requests hold.", held)
        yield self._gauge("mamba_align:state_blocks_kept", "State blocks that are only kept for later requests.", kept)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=_LABELS)
        family.add_metric(self._values, value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=_LABELS)
        family.add_metric(self._values, value)
        return family


class Metrics:
    """The metrics of one server, in a registry of its own."""

    def __init__(self, engine: Engine, model_name: str) -> None:
        """Makes metrics of 0 for an engine that is served under a name."""
        self._registry = CollectorRegistry()
        self._values = (model_name, "0")
        self._registry.register(_EngineNumbers(engine, self._values))
        self._first = self._histogram(
            "vllm:time_to_first_token_seconds", "From a call to its first token.", _TTFT_BUCKETS
        )
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

    def began(self, seconds: float) -> None:
        """Takes note of a request's first tokens, so many seconds after its call."""
        self._first.observe(seconds)

    def looked_up(self, update: RequestUpdate) -> None:
        """Takes note of what the cache had for a request, by the first update of the request."""
        if update.cache_miss is not None:
            self._misses.labels(*self._values, update.cache_miss).inc()

    def generated(self, count: int) -> None:
        """Takes note of tokens."""
        self._generated.inc(count)

    def ended(self, output: RequestOutput, seconds: float) -> None:
        """Takes note of a request's end, so many seconds after its call."""
        self._ends.labels(*self._values, output.finish_reason).inc()
        self._whole.observe(seconds)
        times = sorted(set(output.token_times))
        for before, after in itertools.pairwise(times):
            self._between.observe(after - before)

    def refused(self, status: int, code: str | None) -> None:
        """Takes note of a call that was refused."""
        self._refusals.labels(*self._values, str(status), code or "").inc()

    def text(self) -> bytes:
        """Returns all metrics in Prometheus' text format."""
        return generate_latest(self._registry)
