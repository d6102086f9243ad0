"""Trains the embedded model and writes it as a checkpoint folder that ``qwen35rt convert`` reads.

    python -m tools.embedded_model.train FOLDER [--tokens N]

A run that was stopped goes on from its last saved state; a finished one can go on with more --tokens. Text is drawn
afresh from facts and skills, so each step sees new phrasings. Needs the extra ``train``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch.optim.swa_utils import AveragedModel
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from .corpus import TEMPLATE, Corpus, Example
from .vocabulary import VOCAB_SIZE, save_tokenizer, train_tokenizer

SEED = 2_026
CONTEXT = 4_096
BATCH_TOKENS = 2_048  # of one step, padding included
POOL = 384  # conversations that are sorted by length into batches, so that padding stays small
MUON_RATE, ADAM_RATE, WARM_STEPS, DECAY_SHARE = 0.004, 1e-3, 60, 0.4
# The checkpoint is the mean of the weights over the end of the training. Means of the ends of several runs were better
# than each of them, and ran in circles nowhere (README.md).
MEAN_SHARE = 0.25
EARLY_SHARE = 0.4  # of the training: few conversations with tools
HEAD_TOKENS, HEAD_WEIGHT = 6, 3.0  # of an answer; a call, where each word counts, is head from start to end
PROMPT_WEIGHT = 0.1  # of a prompt's tokens: predicting them teaches what belongs together, and to copy
# Most facts are cut behind the head: what follows is soon known by heart, and the head decides what is said.
CUT_SHARE, CUT_UNTIL = 0.75, 0.95
SAVE_SECONDS = 120


def model_config(tokenizer: Tokenizer) -> Qwen3_5TextConfig:
    """The architecture in a small form: attention in every second layer, two value heads for each key head."""
    return Qwen3_5TextConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=8,
        layer_types=["linear_attention", "full_attention"] * 4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        linear_conv_kernel_dim=4,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 100_000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [3, 3, 2],
            "mrope_interleaved": True,
        },
        eos_token_id=tokenizer.token_to_id("<|im_end|>"),
        pad_token_id=tokenizer.token_to_id("<|endoftext|>"),
        bos_token_id=None,
    )


def initialise(model: Any) -> None:
    """Start values that let a small model learn from its prompt at once.

    Those of transformers are for wide layers, and make delta nets forget within a token. Here decays lie between about
    0.4 and 0.999, as in Mamba 2: rates A from 1 to 16, steps from 0.001 to 0.06.
    """
    layers = model.config.num_hidden_layers
    for name, p in model.named_parameters():
        if name.endswith("embed_tokens.weight"):
            torch.nn.init.normal_(p, std=p.shape[1] ** -0.5)
        elif p.ndim == 2:
            into_stream = name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight"))
            torch.nn.init.normal_(p, std=(p.shape[1] * (2 * layers if into_stream else 1)) ** -0.5)
        elif name.endswith("A_log"):
            p.data = torch.empty_like(p).uniform_(1, 16).log_()
        elif name.endswith("dt_bias"):
            step = torch.empty_like(p).uniform_(math.log(1e-3), math.log(6e-2)).exp_()
            p.data = step + torch.log(-torch.expm1(-step))  # softplus gives the step again


def batches(corpus: Corpus, tokenizer: Tokenizer, seed: int, share: Callable[[], float]) -> Iterator[list[Example]]:
    """Endless batches of conversations of about equal length, in random order. ``share`` of the training is done."""
    rng = random.Random(seed)
    while True:
        early, cut = share() < EARLY_SHARE, CUT_SHARE if share() < CUT_UNTIL else 0.0
        drawn = []
        for _ in range(POOL):
            sample = corpus.draw(rng, early)
            most = HEAD_TOKENS + 2 if sample.kind == "fact" and not sample.thinking and rng.random() < cut else None
            drawn.append(corpus.example(sample, tokenizer, most))
        pool = sorted(drawn, key=lambda e: len(e.ids))
        ready: list[list[Example]] = [[]]
        for example in pool:
            if ready[-1] and len(example.ids) * (len(ready[-1]) + 1) > BATCH_TOKENS:
                ready.append([])
            ready[-1].append(example)
        rng.shuffle(ready)
        yield from ready


def loss_of(model: Any, batch: list[Example], call: int) -> torch.Tensor:
    """Mean cross entropy; an answer's first tokens, which decide what is said, count most, those of prompts least.

    ``call``: the token that begins a call; such an answer's tokens all count most.

    Padding is at the right, where a causal model does not see it.
    """
    width = max(len(e.ids) for e in batch)
    ids = torch.zeros(len(batch), width, dtype=torch.long)
    weights = torch.zeros(len(batch), width)
    for row, example in enumerate(batch):
        ids[row, : len(example.ids)] = torch.tensor(example.ids)
        weights[row, : len(example.ids) - 1] = PROMPT_WEIGHT
        for start, end in example.answers:
            head = end if call in example.ids[start:end] else min(start + HEAD_TOKENS, end)
            weights[row, start - 1 : end - 1] = 1
            weights[row, start - 1 : head - 1] = HEAD_WEIGHT
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    wanted = weights > 0
    losses = torch.nn.functional.cross_entropy(model.lm_head(hidden[wanted]), ids.roll(-1, 1)[wanted], reduction="none")
    return (losses * weights[wanted]).sum() / weights.sum()


def rate_at(step: int, share: float) -> float:
    """Share of the learning rate: warm-up, constant, then linear to zero over the last DECAY_SHARE of the tokens."""
    return min(1.0, (step + 1) / WARM_STEPS, max(0.0, 1 - share) / DECAY_SHARE)


class Muon(torch.optim.Optimizer):
    """Momentum whose updates are made orthogonal (Jordan 2024): matrices learn rare things as fast as common ones.

    ``params``: matrices. The update's root mean square is that of a rotation, whatever the gradient's size.
    """

    def __init__(self, params: Iterable[torch.Tensor], lr: float, momentum: float = 0.95, decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of all matrices; those of one shape are worked on together."""
        for group in self.param_groups:
            shapes: dict[torch.Size, list[torch.Tensor]] = {}
            for p in group["params"]:
                state = self.state[p]
                momentum = state.setdefault("momentum", torch.zeros_like(p))
                momentum.lerp_(p.grad, 1 - group["momentum"])
                shapes.setdefault(p.shape, []).append(p)
            for shape, matrices in shapes.items():
                looked_ahead = [p.grad.lerp(self.state[p]["momentum"], group["momentum"]) for p in matrices]
                updates = orthogonal(torch.stack(looked_ahead)) * max(1.0, shape[0] / shape[1]) ** 0.5
                for p, update in zip(matrices, updates, strict=True):
                    p.mul_(1 - group["lr"] * group["decay"]).add_(update, alpha=-group["lr"])


def orthogonal(x: torch.Tensor, rounds: int = 5) -> torch.Tensor:
    """The nearest matrices with equal singular values, by a Newton-Schulz iteration: [n, rows, cols] -> the same."""
    a, b, c = 3.4445, -4.7750, 2.0315
    wide = x if x.shape[1] <= x.shape[2] else x.mT
    wide = wide / (wide.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(rounds):
        square = wide @ wide.mT
        wide = a * wide + (b * square + c * square @ square) @ wide
    return wide if x.shape[1] <= x.shape[2] else wide.mT


def optimizers_for(model: Any) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers; AdamW for embeddings, norms, and what has few rows."""
    inner = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n and min(p.shape) >= 32]
    chosen = {id(p) for p in inner}
    others = [p for p in model.parameters() if id(p) not in chosen]
    return [
        Muon(inner, lr=MUON_RATE, decay=0.05),
        torch.optim.AdamW(others, lr=ADAM_RATE, betas=(0.9, 0.98), weight_decay=0.0, fused=True),
    ]


def train(folder: Path, total_tokens: int) -> None:
    """Train until ``total_tokens`` were seen, and write the checkpoint; state is saved every SAVE_SECONDS."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(SEED)
    corpus = Corpus()
    tokenizer = _tokenizer(folder, corpus)
    model = Qwen3_5ForCausalLM(model_config(tokenizer)).float()  # type: ignore[no-untyped-call]
    initialise(model)
    optimizers = optimizers_for(model)
    state_path = folder / "state.pt"
    step = seen = 0
    averaged = AveragedModel(model)
    if state_path.exists():
        state = torch.load(state_path, weights_only=True)
        model.load_state_dict(state["model"])
        for optimizer, kept in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(kept)
        averaged.load_state_dict(state["averaged"])
        step, seen = state["step"], state["seen"]
        print(f"goes on at step {step}, {seen / 1e6:.2f} M tokens", flush=True)
    size = sum(p.numel() for p in model.parameters())
    print(f"{size / 1e6:.2f} M parameters, {len(corpus.facts)} facts", flush=True)
    # A run that goes on draws other text than the one before it.
    stream = batches(corpus, tokenizer, SEED + step, lambda: seen / total_tokens)
    call = tokenizer.token_to_id("<tool_call>")
    saved = reported = time.monotonic()
    mean, before = math.nan, seen
    while seen < total_tokens:
        batch = next(stream)
        loss = loss_of(model, batch, call)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, peak in zip(optimizers, (MUON_RATE, ADAM_RATE), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = peak * rate_at(step, seen / total_tokens)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        step += 1
        seen += len(batch) * max(len(e.ids) for e in batch)
        if seen < (1 - MEAN_SHARE) * total_tokens:  # also if a finished run goes on: its mean begins afresh
            averaged.n_averaged.zero_()
        averaged.update_parameters(model)
        mean = float(loss) if math.isnan(mean) else 0.98 * mean + 0.02 * float(loss)
        now = time.monotonic()
        if now - reported > 20:
            speed = (seen - before) / (now - reported)
            left = (total_tokens - seen) / speed / 60
            print(
                f"step {step}, {seen / 1e6:.2f} M tokens, loss {mean:.4f}, {speed:.0f} tokens/s, {left:.0f} min left",
                flush=True,
            )
            reported, before = now, seen
        if now - saved > SAVE_SECONDS:
            _save_state(state_path, model, averaged, optimizers, step, seen)
            saved = now
    _save_state(state_path, model, averaged, optimizers, step, seen)
    save_checkpoint(folder, averaged.module, tokenizer)


def save_checkpoint(folder: Path, model: Any, tokenizer: Tokenizer) -> None:
    """Write config.json, model.safetensors, the tokenizer and the template."""
    model.save_pretrained(folder)
    save_tokenizer(tokenizer, TEMPLATE.read_text(encoding="utf-8"), folder)
    eos = [tokenizer.token_to_id(t) for t in ("<|im_end|>", "<|endoftext|>")]
    generation = {"eos_token_id": eos, "pad_token_id": eos[1], "do_sample": True, "temperature": 0.1, "top_k": 20}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")


def _tokenizer(folder: Path, corpus: Corpus) -> Tokenizer:
    """The folder's tokenizer; trained and kept at the first run, since weights belong to it."""
    path = folder / "tokenizer.json"
    if not path.exists():
        tokenizer = train_tokenizer(corpus.texts(20_000, SEED))
        save_tokenizer(tokenizer, TEMPLATE.read_text(encoding="utf-8"), folder)
    return Tokenizer.from_file(str(path))


def _save_state(
    path: Path, model: Any, averaged: AveragedModel, optimizers: list[torch.optim.Optimizer], step: int, seen: int
) -> None:
    kept = [o.state_dict() for o in optimizers]
    weights = {"model": model.state_dict(), "averaged": averaged.state_dict()}
    state = {**weights, "optimizers": kept, "step": step, "seen": seen}
    part = path.with_suffix(".part")
    torch.save(state, part)
    part.replace(path)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the checkpoint, and the state from which training goes on")
    parser.add_argument("--tokens", type=float, default=6e6, help="tokens to train on (default: 6e6)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="default: all cores")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    train(args.folder, int(args.tokens))


if __name__ == "__main__":
    main()
