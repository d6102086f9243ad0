"""The page of metrics: names of the interface, samples only for what happened."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from qwen35rt.engine.core import Counters
from qwen35rt.engine.engine import RunningTurn
from qwen35rt.server.metrics import series_1_2_5
from tests.server.conftest import Make, Server
from tests.server.fake import asynchronous

NAMES = {
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "state_checkpoints", "info"),
    *("state_bytes", "state_checkpoint_bytes", "requests", "request_success", "num_preemptions", "engine_restarts"),
    *("prompt_tokens", "prompt_tokens_cached", "generation_tokens", "prefix_cache_queries", "prefix_cache_hits"),
    *("state_restores", "time_to_first_token_seconds", "inter_token_latency_seconds"),
    *("request_time_per_output_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"),
    *("request_prefill_time_seconds", "request_decode_time_seconds", "request_inference_time_seconds"),
    *("request_prompt_tokens", "request_generation_tokens", "request_params_max_tokens", "request_params_n"),
}


async def samples(server: Server) -> dict[str, float]:
    answer = await server.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    text = answer.body.decode()
    assert "_created" not in text
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith("_bucket")
    }


@asynchronous
async def test_names_and_samples(server: Server) -> None:
    before = await samples(server)
    assert not [name for name in before if "seconds" in name]
    await server.post({"prompt": "secret", "model": "chosen"})
    text = (await server.get("/metrics")).body.decode()
    families = {f.name: f for f in text_string_to_metric_families(text)}
    assert {f"qwen35rt:{name}" for name in NAMES} <= set(families)
    for family in families.values():
        for sample in family.samples:
            assert sample.labels["model_name"] == "tiny"
            assert sample.labels["engine"] == "0"
    assert "secret" not in text
    assert "chosen" not in text


@asynchronous
async def test_c64_only_phases_that_happened_are_observed(server: Server) -> None:
    await server.post({"prompt": "a", "max_tokens": 1})
    found = await samples(server)
    assert found["qwen35rt:time_to_first_token_seconds_count"] == 1
    assert "qwen35rt:request_decode_time_seconds_count" not in found
    assert "qwen35rt:inter_token_latency_seconds_count" not in found
    await server.post({"prompt": "a", "max_tokens": 0})
    found = await samples(server)
    assert found["qwen35rt:time_to_first_token_seconds_count"] == 1
    assert found["qwen35rt:e2e_request_latency_seconds_count"] == 2
    await server.post({"prompt": "a", "max_tokens": 4})
    found = await samples(server)
    assert found["qwen35rt:inter_token_latency_seconds_count"] == 3
    assert found["qwen35rt:request_decode_time_seconds_count"] == 1
    assert found["qwen35rt:request_generation_tokens_sum"] == 5


@asynchronous
async def test_buffered_and_streamed_requests_are_measured_alike(server: Server) -> None:
    for stream in (False, True):
        await server.post({"prompt": "a", "stream": stream})
    found = await samples(server)
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_decode_time"):
        assert found[f"qwen35rt:{name}_seconds_count"] == 2
    assert found["qwen35rt:request_success_total"] == 2


@asynchronous
async def test_c64_latency_runs_from_the_arrival_of_the_head(make: Make) -> None:
    """The time in which a body comes belongs to it, but to no phase of the engine."""
    for stream in (b"false", b"true"):
        server = make()
        request = server.begin(b'{"stream": ' + stream, complete=False)
        await asyncio.sleep(0.3)
        request._incoming.put_nowait({"type": "http.request", "body": b', "prompt": "a"}', "more_body": False})
        assert (await request.end()).status == 200
        found = await samples(server)
        first, queue, prefill, whole = (
            found[f"qwen35rt:{name}_seconds_sum"]
            for name in ("time_to_first_token", "request_queue_time", "request_prefill_time", "e2e_request_latency")
        )
        assert whole >= first >= queue + prefill + 0.29


@asynchronous
async def test_series_for_vllm_dashboards(make: Make) -> None:
    server = make(metrics_compat=("vllm",))
    await server.post({"prompt": "a"})
    text = (await server.get("/metrics")).body.decode()
    own = set(re.findall(r"^qwen35rt:(\w+)", text, re.MULTILINE))
    assert own == set(re.findall(r"^vllm:(\w+)", text, re.MULTILINE))
    assert own


@asynchronous
async def test_series_with_llama_servers_names(make: Make) -> None:
    server = make(metrics_compat=("llamacpp",))
    assert not [name for name in await samples(server) if name.startswith("llamacpp:") and "seconds" in name]
    await server.post({"prompt": "a", "max_tokens": 3})
    found = await samples(server)
    own = {name.partition(":")[2]: value for name, value in found.items() if name.startswith("llamacpp:")}
    assert own["prompt_seconds_total"] > 0
    assert own["tokens_predicted_seconds_total"] > 0
    assert own["predicted_tokens_seconds"] > 0
    assert not [name for name in await samples(make()) if name.startswith("llamacpp:")]


def engine_that_did(server: Server, changes: dict[str, Any] | None = None, **counts: Any) -> None:
    """Have the engine say that it did so much. ``changes``: of its snapshot."""
    now = replace(server.engine.snapshot(), **{"state_bytes": 4096, **(changes or {})}, counters=Counters(**counts))
    server.engine.snapshot = lambda: now  # type: ignore[method-assign]


@asynchronous
async def test_each_series_has_the_engines_own_number(make: Make) -> None:
    """All numbers differ, so that a series that reads another one shows."""
    server = make(metrics_compat=("llamacpp",))
    running = (RunningTurn("r", 1, 1, 1, False),) * 2
    now = {"running": running, "waiting": 3, "pages": 8, "pages_free": 6, "state_bytes": 5, "cache_entries": 7}
    now |= {"cache_bytes": 11, "cache_limit_bytes": 13, "restarts": 17}
    numbers = {"steps": 19, "rows": 23, "turn_steps": 29, "longest": 31, "prompt_tokens": 37, "cached_tokens": 41}
    numbers |= {"queried_tokens": 43, "generated_tokens": 47, "queries": 53, "restores": 59, "preemptions": 61}
    engine_that_did(server, now, **numbers, evictions=67)
    found = await samples(server)
    want = {
        "qwen35rt:num_requests_running": 2,
        "qwen35rt:num_requests_waiting": 3,
        "qwen35rt:kv_cache_usage_perc": 0.25,
        "qwen35rt:state_bytes": 5,
        "qwen35rt:state_checkpoints": 7,
        "qwen35rt:state_checkpoint_bytes": 11,
        "qwen35rt:engine_restarts_total": 17,
        "qwen35rt:prompt_tokens_total": 37,
        "qwen35rt:prompt_tokens_cached_total": 41,
        "qwen35rt:prefix_cache_hits_total": 41,
        "qwen35rt:prefix_cache_queries_total": 43,
        "qwen35rt:generation_tokens_total": 47,
        "qwen35rt:state_restores_total": 59,
        "qwen35rt:num_preemptions_total": 61,
        "llamacpp:requests_processing": 2,
        "llamacpp:requests_deferred": 3,
        "llamacpp:n_decode_total": 19,
        "llamacpp:prompt_tokens_total": 37,
        "llamacpp:tokens_predicted_total": 47,
    }
    assert {name: found[name] for name in want} == want


@asynchronous
async def test_rows_of_steps_are_a_histogram(server: Server) -> None:
    name = "qwen35rt:iteration_tokens_total"
    assert not [n for n in await samples(server) if n.startswith(name)]
    engine_that_did(server, steps=5, rows=630, step_rows={1: 2, 8: 1, 100: 1, 520: 1})
    text = (await server.get("/metrics")).body.decode()
    (family,) = [f for f in text_string_to_metric_families(text) if f.name == name]
    assert family.type == "histogram"
    buckets = {s.labels["le"]: s.value for s in family.samples if s.name == f"{name}_bucket"}
    edges = [1, *(8 << n for n in range(12))]
    assert list(buckets) == [*(f"{edge}.0" for edge in edges), "+Inf"]
    assert list(buckets.values()) == [2, 3, 3, 3, 3, 4, 4, 4, 5, 5, 5, 5, 5, 5]
    found = await samples(server)
    assert (found[f"{name}_count"], found[f"{name}_sum"]) == (5, 630)
    assert found["qwen35rt:state_bytes"] == 4096


@asynchronous
async def test_busy_slots_and_longest_sequence_with_llama_servers_names(make: Make) -> None:
    server = make(metrics_compat=("llamacpp",))
    names = "llamacpp:n_tokens_max", "llamacpp:n_busy_slots_per_decode"
    assert not {*names} & {*await samples(server)}
    engine_that_did(server, steps=4, turn_steps=10, longest=77)
    found = await samples(server)
    assert [found[name] for name in names] == [77, 2.5]


@asynchronous
async def test_each_series_says_what_it_is(make: Make) -> None:
    server = make(metrics_compat=("llamacpp", "vllm"))
    engine_that_did(server, steps=1, rows=1, step_rows={1: 1}, turn_steps=1, longest=1)
    await server.post({"prompt": "a"})
    text = (await server.get("/metrics")).body.decode()
    for family in text_string_to_metric_families(text):
        assert len(family.documentation.split()) > 2, family.name
        assert family.documentation[0].isupper()


@asynchronous
async def test_unknown_paths_are_one_label(server: Server) -> None:
    for path in ("/a", "/b", "/c"):
        await server.get(path)
    text = (await server.get("/metrics")).body.decode()
    assert re.search(r'requests_total\{endpoint="unmatched",.*status="404"\} 3.0', text)


def test_the_1_2_5_series() -> None:
    assert series_1_2_5(256) == (1, 2, 5, 10, 20, 50, 100, 200, 500)
    assert series_1_2_5(1) == (1,)
