"""GET /v1/models and /v1/models/{id}: the names of the loaded model and its sizes."""

from __future__ import annotations

from quart import Response

from .answer import Json
from .errors import ModelNotFound
from .model import Loaded
from .record import Record
from .service import Service
from .stream import json_response

_VOCAB_TYPES = {"llama": 1, "gpt2": 2}  # llama.cpp's numbers: SentencePiece, byte-level BPE


async def list_models(service: Service, record: Record) -> Response:
    """GET /v1/models: one entry for the id, one for each further alias."""
    model = service.model
    names = dict.fromkeys((model.facts.id, *model.facts.aliases))
    return json_response({"object": "list", "data": [_entry(model, name) for name in names]})


async def get_model(service: Service, record: Record, id: str) -> Response:
    """GET /v1/models/{id}. Raises ModelNotFound."""
    model = service.model
    if id not in model.facts.names:
        raise ModelNotFound("there is no model of this name", "id")
    return json_response(_entry(model, id))


def _entry(model: Loaded, name: str) -> Json:
    facts = model.facts
    return {
        "id": name,
        "object": "model",
        "created": facts.created,
        "owned_by": "qwen35rt",
        "max_model_len": facts.n_ctx,
        "meta": {
            "vocab_type": _VOCAB_TYPES.get(model.tokenizer.vocab.model, 0),
            "n_vocab": facts.n_vocab,
            "n_ctx_train": facts.n_ctx_train or facts.n_ctx,
            "n_embd": facts.n_embd,
            "n_params": facts.n_params,
            "size": facts.size,
        },
    }
