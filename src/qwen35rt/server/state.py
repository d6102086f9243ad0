"""What runs and how it is set up: /props, /slots, /version, /load. Reads snapshots; waits for nothing."""

from __future__ import annotations

import dataclasses

from quart import Response, request

from .. import __version__
from ..config import ENGINE
from ..engine.engine import RunningTurn
from ..engine.sampler import SamplingParams
from ..plan import Plan, sampling_params
from .answer import Json
from .errors import NoSlotFree, NotBuiltYet
from .model import Loaded
from .record import Record
from .service import Service
from .stream import json_response

_WITH_TEXT = frozenset(("stop", "logit_bias", "stop_token_ids"))  # what a client wrote is not shown to others


async def version(service: Service, record: Record) -> Response:
    """GET /version."""
    return json_response({"version": __version__})


async def load(service: Service, record: Record) -> Response:
    """GET /load: generating requests that have not ended."""
    record.quiet = True
    return json_response({"server_load": service.pace.running})


async def props(service: Service, record: Record) -> Response:
    """GET /props. No path of this machine is shown."""
    model, settings = service.model, service.settings
    facts = model.facts
    return json_response(
        {
            "model_path": facts.file_name,
            "model_alias": facts.id,
            "chat_template": model.template.source if model.template is not None else "",
            "modalities": {"vision": False, "audio": False},
            "total_slots": settings.parallel,
            "n_ctx": facts.n_ctx,
            "default_generation_settings": {"n_ctx": facts.n_ctx, "params": _defaults(service, model)},
            "build_info": f"qwen35rt {__version__}",
            "device": facts.device,
            "device_name": facts.device_name,
            "device_reason": facts.reason,
            "n_gpu_layers": facts.n_gpu_layers,
            "n_layers": facts.n_layers,
            "isa": facts.isa,
            "threads": facts.threads,
        }
    )


async def slots(service: Service, record: Record) -> Response:
    """GET /slots, in order of arrival. Raises NoSlotFree with fail_on_no_slot=1 where each has work."""
    record.quiet = True
    if service.settings.no_slots:
        raise NotBuiltYet("/slots is turned off (--no-slots)")
    model, parallel = service.model, service.settings.parallel
    running = list(model.engine.snapshot().running)[:parallel]
    if request.args.get("fail_on_no_slot") == "1" and len(running) >= parallel:
        raise NoSlotFree("no slot is free")
    known = {turns.request_id: turns.plans[0] for turns in service.live}
    found = [_slot(i, turn, known.get(turn.request_id), model.facts.n_ctx) for i, turn in enumerate(running)]
    found += [_slot(i, None, None, model.facts.n_ctx) for i in range(len(found), parallel)]
    return json_response(found)


def _slot(index: int, turn: RunningTurn | None, plan: Plan | None, n_ctx: int) -> Json:
    return {
        "id": index,
        "is_processing": turn is not None,
        "n_ctx": n_ctx,
        "n_tokens": 0 if turn is None else turn.prompt_done + turn.generated,
        "n_cached": 0 if turn is None else turn.cached,
        "request_id": None if turn is None else turn.request_id,
        "params": None if plan is None else {**_shown(plan.params), "max_tokens": plan.budget, "seed": plan.seed},
    }


def _shown(params: SamplingParams) -> Json:
    return {
        f.name: getattr(params, f.name)
        for f in dataclasses.fields(params)
        if f.name not in _WITH_TEXT and isinstance(getattr(params, f.name), bool | int | float | None)
    }


def _defaults(service: Service, model: Loaded) -> Json:
    """Sampling fields of a text completion that names none."""
    settings = service.settings
    params = sampling_params(settings.sampling, model.facts.metadata, model.facts.n_vocab)
    limit = ENGINE.max_tokens if settings.max_tokens_default is None else settings.max_tokens_default
    return {**_shown(params), "max_tokens": limit}
