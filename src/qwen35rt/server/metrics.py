"""Prometheus metrics (server_api.md, section 9). One registry per application.

Counts of requests come from their records, those of the engine from its snapshot at the time of a scrape.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from .. import __version__
from ..engine.core import Counters, Event
from ..engine.engine import EngineSnapshot
from ..engine.result import Completion, Delta
from ..plan import Plan
from .model import ModelFacts
from .record import Record

PREFIX = "qwen35rt:"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_TTFT = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
)
_TOKEN = (
    *(0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80),
)
_REQUEST = (*(0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680),)
_N = (1, 2, 5, 10, 20)
_ROWS = (1, *(8 << n for n in range(12)))
_LABELS = ("model_name", "engine")
_HISTOGRAMS = {
    "time_to_first_token_seconds": _TTFT,
    "inter_token_latency_seconds": _TOKEN,
    "request_time_per_output_token_seconds": _TOKEN,
    "e2e_request_latency_seconds": _REQUEST,
    "request_queue_time_seconds": _REQUEST,
    "request_prefill_time_seconds": _REQUEST,
    "request_decode_time_seconds": _REQUEST,
    "request_inference_time_seconds": _REQUEST,
    "request_params_n": _N,
}
_TOKEN_COUNTS = ("request_prompt_tokens", "request_generation_tokens", "request_params_max_tokens")
_HELP = {
    "num_requests_running": "Turns that have a slot.",
    "num_requests_waiting": "Turns that wait for a slot.",
    "kv_cache_usage_perc": "Share of the pages of keys and values in use, 0 to 1.",
    "state_bytes": "Bytes of recurrent states in use, of running turns and of kept ones.",
    "state_checkpoints": "States that are kept for later prompts.",
    "state_checkpoint_bytes": "Bytes of kept states and of their pages.",
    "info": "What runs here, always 1.",
    "device_info": "Where it runs, always 1.",
    "requests": "Requests that have ended, each once.",
    "request_success": "Answers that are complete, each choice of a request.",
    "admission_rejections": "Requests that were not taken, by error code.",
    "num_preemptions_total": "Turns that gave up their memory and began again.",
    "engine_restarts_total": "Restarts of the engine after faults.",
    "prompt_tokens_total": "Prompt tokens that were computed.",
    "prompt_tokens_cached_total": "Prompt tokens that were taken from kept states.",
    "generation_tokens_total": "Tokens that were drawn.",
    "prefix_cache_queries_total": "Tokens of prompts that were looked up among kept states.",
    "prefix_cache_hits_total": "Tokens of prompts that were found in kept states.",
    "state_restores_total": "Turns that began from a kept state.",
    "time_to_first_token_seconds": "From the head of a request to the first token.",
    "inter_token_latency_seconds": "Between two tokens of a turn.",
    "request_time_per_output_token_seconds": "Mean time of a turn between two tokens.",
    "e2e_request_latency_seconds": "From the head of a request to its end.",
    "request_queue_time_seconds": "From the place in the queue to the first step.",
    "request_prefill_time_seconds": "From the first step to the first token.",
    "request_decode_time_seconds": "From the first token to the last.",
    "request_inference_time_seconds": "From the first step to the last token.",
    "request_params_n": "Choices that a request asked for.",
    "request_prompt_tokens": "Prompt tokens of a turn.",
    "request_generation_tokens": "Completion tokens of a turn.",
    "request_params_max_tokens": "Tokens that a turn may draw.",
    "iteration_tokens_total": "Rows of a step, of prompts and of answers.",
    # llama-server's
    "prompt_seconds_total": "Seconds in which prompts were computed.",
    "prompt_tokens_seconds": "Prompt tokens per second.",
    "tokens_predicted_total": "Tokens that were drawn.",
    "tokens_predicted_seconds_total": "Seconds in which answers were computed.",
    "predicted_tokens_seconds": "Tokens per second of answers.",
    "requests_processing": "Turns that have a slot.",
    "requests_deferred": "Turns that wait for a slot.",
    "n_tokens_max": "Tokens of the longest sequence so far.",
    "n_decode_total": "Steps of the model so far.",
    "n_busy_slots_per_decode": "Mean number of slots with work in a step.",
}

_Read = Callable[[EngineSnapshot], float]
GAUGES: dict[str, _Read] = {
    "num_requests_running": lambda s: len(s.running),
    "num_requests_waiting": lambda s: s.waiting,
    "kv_cache_usage_perc": lambda s: 1 - s.pages_free / s.pages if s.pages else 0.0,
    "state_bytes": lambda s: s.state_bytes,
    "state_checkpoints": lambda s: s.cache_entries,
    "state_checkpoint_bytes": lambda s: s.cache_bytes,
}
COUNTERS: dict[str, _Read] = {
    "num_preemptions_total": lambda s: s.counters.preemptions,
    "engine_restarts_total": lambda s: s.restarts,
    "prompt_tokens_total": lambda s: s.counters.prompt_tokens,
    "prompt_tokens_cached_total": lambda s: s.counters.cached_tokens,
    "generation_tokens_total": lambda s: s.counters.generated_tokens,
    "prefix_cache_queries_total": lambda s: s.counters.queried_tokens,
    "prefix_cache_hits_total": lambda s: s.counters.cached_tokens,
    "state_restores_total": lambda s: s.counters.restores,
}


# llama-server's names, with --metrics-compat llamacpp; seconds are those of finished turns.
_LLAMA_GAUGES: dict[str, _Read] = {
    "requests_processing": lambda s: len(s.running),
    "requests_deferred": lambda s: s.waiting,
}
_LLAMA_COUNTERS: dict[str, _Read] = {
    "prompt_tokens_total": lambda s: s.counters.prompt_tokens,
    "tokens_predicted_total": lambda s: s.counters.generated_tokens,
    "n_decode_total": lambda s: s.counters.steps,
}


def series_1_2_5(limit: int) -> tuple[int, ...]:
    """1, 2, 5, 10, ... up to and with the first that reaches ``limit``."""
    found: list[int] = []
    step = 1
    while not found or found[-1] < limit:
        found += [step, 2 * step, 5 * step]
        step *= 10
    return tuple(found[: next(i for i, n in enumerate(found) if n >= limit) + 1])


class Metrics:
    """Told of requests, turns and events; ``text`` is the page. A series exists once it has a sample."""

    def __init__(self, snapshot: Callable[[], EngineSnapshot | None], compat: Sequence[str] = ()) -> None:
        self._registry = CollectorRegistry()
        self._facts: ModelFacts | None = None
        self._snapshot, self._compat = snapshot, compat
        self._histograms: dict[str, Histogram] = {}
        self._seconds = {"prompt": [0, 0.0], "predicted": [0, 0.0]}  # tokens and seconds of finished turns
        self._counters = {
            "requests": self._counter("requests", ("endpoint", "outcome", "status")),
            "request_success": self._counter("request_success", ("finished_reason",)),
            "admission_rejections": self._counter("admission_rejections", ("reason",)),
        }
        for name, buckets in _HISTOGRAMS.items():
            self._add_histogram(name, buckets)
        self._registry.register(_EngineSeries(self))

    def loaded(self, facts: ModelFacts) -> None:
        """The model is known: its name is a label from now on, its context bounds the counts of tokens."""
        self._facts = facts
        for name in _TOKEN_COUNTS:
            if name not in self._histograms:
                self._add_histogram(name, series_1_2_5(facts.n_ctx))

    @property
    def labels(self) -> tuple[str, str]:
        """Values of the labels that every series has."""
        return (self._facts.id if self._facts else "", "0")

    def count(self, name: str, *labels: str) -> None:
        """Add one to a counter."""
        self._counters[name].labels(*self.labels, *labels).inc()

    def observe(self, name: str, value: float | None) -> None:
        """Add a sample to a histogram; None is no sample: that phase did not happen."""
        if value is not None:
            self._histograms[name].labels(*self.labels).observe(value)

    def request(self, record: Record) -> None:
        """A request has ended, in whatever way."""
        self.count("requests", record.endpoint, str(record.outcome), str(record.status))
        for reason in record.finish_reasons:
            self.count("request_success", reason)
        if record.completions:
            self.observe("e2e_request_latency_seconds", record.seconds)

    def rejected(self, reason: str) -> None:
        """A request was not admitted. ``reason``: the error's code."""
        self.count("admission_rejections", reason)

    def submitted(self, plans: Sequence[Plan]) -> None:
        """Turns are about to be handed to the engine."""
        self.observe("request_params_n", 1)
        for plan in plans:
            self.observe("request_params_max_tokens", plan.budget)

    def watch(self, before: float) -> Callable[[int, Event, float], None]:
        """An observer of one request's events. ``before``: seconds from its head to its place in the queue."""
        last: dict[int, float] = {}

        def observe(index: int, event: Event, at: float) -> None:
            if isinstance(event, Delta):
                if index in last:
                    self.observe("inter_token_latency_seconds", at - last[index])
                last[index] = at
            elif isinstance(event, Completion):
                self._turn(event, before)

        return observe

    def text(self) -> bytes:
        """The page."""
        return generate_latest(_Plain(self._registry, self._compat))

    def _turn(self, completion: Completion, before: float) -> None:
        timings = completion.timings
        for phase, tokens, ms in (
            ("prompt", timings.prompt_n, timings.prompt_ms),
            ("predicted", timings.predicted_n - 1, timings.predicted_ms),
        ):
            if ms is not None:
                self._seconds[phase][0] += tokens
                self._seconds[phase][1] += ms / 1e3

        def seconds(ms: float | None) -> float | None:
            return None if ms is None else ms / 1e3

        self.observe("request_prompt_tokens", completion.usage.prompt_tokens)
        self.observe("request_generation_tokens", completion.usage.completion_tokens)
        if timings.ttft_ms is not None:
            self.observe("time_to_first_token_seconds", before + timings.ttft_ms / 1e3)
        self.observe("request_queue_time_seconds", seconds(timings.queue_ms))
        self.observe("request_prefill_time_seconds", seconds(timings.prompt_ms))
        self.observe("request_decode_time_seconds", seconds(timings.predicted_ms))
        self.observe("request_time_per_output_token_seconds", seconds(timings.predicted_per_token_ms))
        if timings.prompt_ms is not None:
            self.observe("request_inference_time_seconds", (timings.prompt_ms + (timings.predicted_ms or 0.0)) / 1e3)

    def _counter(self, name: str, labels: Sequence[str]) -> Counter:
        return Counter(PREFIX + name, _HELP[name], (*_LABELS, *labels), registry=self._registry)

    def _add_histogram(self, name: str, buckets: Sequence[float]) -> None:
        made = Histogram(PREFIX + name, _HELP[name], _LABELS, buckets=buckets, registry=self._registry)
        self._histograms[name] = made

    def engine_series(self) -> Iterator[Metric]:
        """What the engine counts, as it stands now."""
        facts = self._facts
        found = self._snapshot()
        if facts is None or found is None:
            return
        labels = self.labels
        info = GaugeMetricFamily(PREFIX + "info", _HELP["info"], labels=(*_LABELS, "version", "device", "isa", "quant"))
        info.add_metric((*labels, __version__, facts.device, facts.isa, facts.quant), 1)
        yield info
        where = ("backend", "device", "n_gpu_layers", "n_layers")
        device = GaugeMetricFamily(PREFIX + "device_info", _HELP["device_info"], labels=(*_LABELS, *where))
        counts = str(facts.n_gpu_layers), str(facts.n_layers)
        device.add_metric((*labels, facts.device, facts.device_name, *counts), 1)
        yield device
        yield from _families(PREFIX, labels, _values(GAUGES, found), _values(COUNTERS, found))
        if found.counters.steps:
            yield _rows_of_steps(labels, found.counters)
        if "llamacpp" in self._compat:
            gauges, counters = _values(_LLAMA_GAUGES, found), _values(_LLAMA_COUNTERS, found)
            for phase, name in (("prompt", "prompt"), ("predicted", "tokens_predicted")):
                tokens, spent = self._seconds[phase]
                if spent:
                    counters[f"{name}_seconds_total"] = spent
                    gauges[f"{phase}_tokens_seconds"] = tokens / spent
            if found.counters.steps:
                gauges["n_tokens_max"] = found.counters.longest
                gauges["n_busy_slots_per_decode"] = found.counters.turn_steps / found.counters.steps
            yield from _families("llamacpp:", labels, gauges, counters)


def _values(reads: dict[str, _Read], snapshot: EngineSnapshot) -> dict[str, float]:
    return {name: read(snapshot) for name, read in reads.items()}


def _families(
    prefix: str, labels: Sequence[str], gauges: dict[str, float], counters: dict[str, float]
) -> Iterator[Metric]:
    for kind, values in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
        for name, value in values.items():
            family = kind(prefix + name, _HELP[name], labels=_LABELS)
            family.add_metric(labels, value)
            yield family


def _rows_of_steps(labels: Sequence[str], counters: Counters) -> Metric:
    name = "iteration_tokens_total"
    steps = [0] * (len(_ROWS) + 1)
    for rows, n in counters.step_rows.items():
        steps[bisect_left(_ROWS, rows)] += n
    buckets = zip([*(f"{float(edge)}" for edge in _ROWS), "+Inf"], accumulate(steps), strict=True)
    family = HistogramMetricFamily(PREFIX + name, _HELP[name], labels=_LABELS)
    family.add_metric(labels, list(buckets), counters.rows)
    return family


class _EngineSeries(Collector):
    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        return self._metrics.engine_series()


class _Plain:
    """The registry without the times at which series were made; with --metrics-compat vllm each series twice."""

    def __init__(self, registry: CollectorRegistry, compat: Sequence[str]) -> None:
        self._registry = registry
        self._prefixes = (PREFIX, "vllm:") if "vllm" in compat else (PREFIX,)

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            samples = [s for s in metric.samples if not s.name.endswith("_created")]
            if not samples:
                continue
            for prefix in self._prefixes if metric.name.startswith(PREFIX) else ("",):
                copy = Metric(metric.name.replace(PREFIX, prefix, 1), metric.documentation, metric.type)
                copy.samples = [s._replace(name=s.name.replace(PREFIX, prefix, 1)) for s in samples]
                yield copy
