"""The server exports what its dashboard and other people's routers read, and the numbers are right."""

import json
import re
import threading
import time
from pathlib import Path

from fakes.http import Served, wait_until
from prometheus_client.parser import text_string_to_metric_families

from mamba_align_jax.serve.settings import Settings

DASHBOARD = Path(__file__).parents[2] / "docs" / "dashboards" / "serving.json"
SERVING = Path(__file__).parents[2] / "docs" / "serving.md"
# What routers and dashboards read of vLLM (vllm/v1/metrics/loggers.py).
VLLM = (
    *("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"),
    *("vllm:time_to_first_token_seconds_bucket", "vllm:inter_token_latency_seconds_bucket"),
    *("vllm:e2e_request_latency_seconds_bucket", "vllm:prompt_tokens_total", "vllm:generation_tokens_total"),
    *("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total", "vllm:request_success_total"),
    *("vllm:spec_decode_num_accepted_tokens_total", "vllm:spec_decode_num_draft_tokens_total"),
    *("vllm:spec_decode_num_drafts_total", "vllm:num_preemptions_total"),
)


def exported(served):
    """The names of all samples after a call of each kind."""
    served.complete("x = 1\n" * 30, max_tokens=3, ignore_eos=True)
    served.post("/v1/completions", {})
    families = text_string_to_metric_families(served.client.get("/metrics").text)
    return {sample.name: sample.labels for family in families for sample in family.samples}


def test_vllms_names_and_labels_are_exported(served):
    found = exported(served)
    for name in VLLM:
        assert found[name].items() >= {"model_name": "bytes", "engine": "0"}.items(), name


def test_the_text_is_what_prometheus_reads(served):
    reply = served.client.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert "# TYPE vllm:num_requests_running gauge" in reply.text


def test_every_metric_of_the_dashboard_is_exported(served):
    dashboard = json.loads(DASHBOARD.read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    variables = [one["definition"] for one in dashboard["templating"]["list"] if one["type"] == "query"]
    names = {name for text in expressions + variables for name in re.findall(r"\b(?:vllm|mamba_align):\w+", text)}
    assert len(expressions) > 12
    assert names - exported(served).keys() == set()
    labels = {
        label for text in expressions for group in re.findall(r"by \(([^)]+)\)", text) for label in group.split(", ")
    }
    assert labels - {"le"} <= {label for found in exported(served).values() for label in found}


def test_the_dashboard_has_panels_that_do_not_overlap():
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (place["x"] + x, place["y"] + y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["w"])
        for y in range(place["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24


def test_every_metric_of_the_page_is_exported(served):
    names = set(re.findall(r"`((?:vllm|mamba_align):\w+)`", SERVING.read_text()))
    found = exported(served)
    assert len(names) > 15
    assert {name for name in names if not {name, f"{name}_bucket"} & found.keys()} == set()


def test_calls_move_the_numbers(served):
    prompt = "y = 2\n" * 30
    names = (
        *("vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:prefix_cache_hits_total"),
        *("vllm:time_to_first_token_seconds_count", "vllm:e2e_request_latency_seconds_count"),
        *("vllm:inter_token_latency_seconds_count", "mamba_align:hit_requests_total"),
    )
    exported(served)
    fields = dict(max_tokens=5, ignore_eos=True, temperature=0)
    served.complete(prompt, **fields)
    before = {name: served.metric(name) for name in names}
    served.complete(prompt, **fields)
    moved = [served.metric(name) - before[name] for name in names]
    assert moved == [180, 5, 128, 1, 1, 4, 1]
    assert served.metric("mamba_align:state_blocks_kept") == served.engine.cache.states.pool.num_cached > 0


def test_a_request_ends_no_earlier_than_its_first_token_comes(served):
    """Both are counted from the call on, however long it takes until the engine takes the request."""
    names = ("vllm:time_to_first_token_seconds_sum", "vllm:e2e_request_latency_seconds_sum")
    exported(served)
    before = [served.metric(name) for name in names]
    served.service.serving._commands.put(lambda: time.sleep(0.5))
    served.complete("x", max_tokens=1)
    first, whole = (served.metric(name) - earlier for name, earlier in zip(names, before, strict=True))
    assert whole >= first > 0.25


def test_misses_are_counted_by_their_reason(served):
    served.complete("z = 3\n" * 30, max_tokens=1)
    before = served.metric("mamba_align:cache_misses_total", reason="not identical")
    served.complete("a = 4\n" * 30, max_tokens=1)
    assert served.metric("mamba_align:cache_misses_total", reason="not identical") == before + 1


def test_the_miss_of_a_request_that_generates_nothing_is_counted(served):
    before = served.metric("mamba_align:cache_misses_total")
    served.complete("q" * 300, max_tokens=0, echo=True, logprobs=0)
    assert served.metric("mamba_align:cache_misses_total") == before + 1


def test_running_and_waiting_requests_are_seen(served, monkeypatch):
    # The first step with all requests waits until they have been seen. On a busy machine steps begin before all have come.
    gate, scheduler, read = threading.Event(), served.engine.scheduler, served.engine.runner.read
    all_are_here = lambda: (len(scheduler.running), len(scheduler.waiting)) == (4, 2)
    monkeypatch.setattr(served.engine.runner, "read", lambda step: (all_are_here() and gate.wait(400), read(step))[1])

    def seen(client):
        found = re.findall(r"^vllm:num_requests_(\w+)\{.*\} (\S+)$", client.get("/metrics").text, re.MULTILINE)
        return {name: float(value) for name, value in found}

    call = {"prompt": "x", "n": 6, "max_tokens": 400, "ignore_eos": True, "stream": True}
    with served.client.stream("POST", "/v1/completions", json=call) as response:
        next(response.iter_lines())
        with served.new_client() as other:
            wait_until(lambda: seen(other) == {"running": 4, "waiting": 2})
        gate.set()
    wait_until(lambda: not served.engine.has_unfinished)


def test_two_servers_have_metrics_of_their_own(engine):
    for name in ("first", "second"):
        with Served(engine, Settings(model_name=name, warmup="none")) as served:
            assert served.metric("vllm:generation_tokens_total", model_name=name) == 0
            served.complete("x", max_tokens=2, ignore_eos=True)
            assert served.metric("vllm:generation_tokens_total", model_name=name) == 2
