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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from .corpus import TEMPLATE, Corpus, Example
from .vocabulary import VOCAB_SIZE, save_tokenizer, train_tokenizer

SEED = 2_026
CONTEXT = 4_096
BATCH_TOKENS = 2_048  # of one step, padding included
POOL = 384  # conversations that are sorted by length into batches, so that padding stays small
PEAK_RATE, WARM_STEPS, DECAY_SHARE = 2.5e-3, 100, 0.4
SAVE_SECONDS = 180


def model_config(tokenizer: Tokenizer) -> Qwen3_5TextConfig:
    """The architecture in a small form: attention in every second layer, two value heads for each key head."""
    return Qwen3_5TextConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=6,
        layer_types=["linear_attention", "full_attention"] * 3,
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


def batches(corpus: Corpus, tokenizer: Tokenizer, seed: int) -> Iterator[list[Example]]:
    """Endless batches of conversations of about equal length, in random order."""
    rng = random.Random(seed)
    while True:
        pool = sorted((corpus.example(corpus.draw(rng), tokenizer) for _ in range(POOL)), key=lambda e: len(e.ids))
        ready: list[list[Example]] = [[]]
        for example in pool:
            if ready[-1] and len(example.ids) * (len(ready[-1]) + 1) > BATCH_TOKENS:
                ready.append([])
            ready[-1].append(example)
        rng.shuffle(ready)
        yield from ready


def loss_of(model: Any, batch: list[Example]) -> torch.Tensor:
    """Mean cross entropy of the answers' tokens. Padding is at the right, where a causal model does not see it."""
    width = max(len(e.ids) for e in batch)
    ids = torch.zeros(len(batch), width, dtype=torch.long)
    wanted = torch.zeros(len(batch), width, dtype=torch.bool)
    for row, example in enumerate(batch):
        ids[row, : len(example.ids)] = torch.tensor(example.ids)
        wanted[row, example.start - 1 : len(example.ids) - 1] = True
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    targets = ids.roll(-1, 1)[wanted]
    return torch.nn.functional.cross_entropy(model.lm_head(hidden[wanted]), targets)


def rate_at(step: int, share: float) -> float:
    """Learning rate: warm-up, constant, then linear to zero over the last DECAY_SHARE of the tokens."""
    return PEAK_RATE * min(1.0, (step + 1) / WARM_STEPS, max(0.0, 1 - share) / DECAY_SHARE)


def optimizer_for(model: Any) -> torch.optim.AdamW:
    """AdamW; decay for matrices only."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=PEAK_RATE, betas=(0.9, 0.98), fused=True)


def train(folder: Path, total_tokens: int) -> None:
    """Train until ``total_tokens`` were seen, and write the checkpoint; state is saved every SAVE_SECONDS."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(SEED)
    corpus = Corpus()
    tokenizer = _tokenizer(folder, corpus)
    model = Qwen3_5ForCausalLM(model_config(tokenizer)).float()  # type: ignore[no-untyped-call]
    initialise(model)
    optimizer = optimizer_for(model)
    state_path = folder / "state.pt"
    step = seen = 0
    if state_path.exists():
        state = torch.load(state_path, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step, seen = state["step"], state["seen"]
        print(f"goes on at step {step}, {seen / 1e6:.2f} M tokens", flush=True)
    size = sum(p.numel() for p in model.parameters())
    print(f"{size / 1e6:.2f} M parameters, {len(corpus.facts)} facts", flush=True)
    # A run that goes on draws other text than the one before it.
    stream = batches(corpus, tokenizer, SEED + step)
    saved = reported = time.monotonic()
    mean, before = math.nan, seen
    while seen < total_tokens:
        batch = next(stream)
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, seen / total_tokens)
        loss = loss_of(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        seen += len(batch) * max(len(e.ids) for e in batch)
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
            _save_state(state_path, model, optimizer, step, seen)
            saved = now
    _save_state(state_path, model, optimizer, step, seen)
    save_checkpoint(folder, model, tokenizer)


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


def _save_state(path: Path, model: Any, optimizer: torch.optim.Optimizer, step: int, seen: int) -> None:
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "seen": seen}
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
