"""The trainside engine on a real pretrained model: the tokens that transformers gives."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from jaxrl.checkpoint.hf import load_hf_config, load_params
from jaxrl.models import Model, ModelConfig
from jaxrl.rollout import TrainsideEngine
from jaxrl.types import Prompt, Sampling

ROOT = Path(__file__).resolve().parents[2]
SMOLLM2 = ROOT / "models" / "SmolLM2-135M-Instruct"


def test_greedy_equals_transformers_on_smollm2() -> None:
    """50 prompts, 32 tokens, float32; a first difference only where transformers is at a tie.

    Needs models/SmolLM2-135M-Instruct; `python scripts/get_smollm2.py` makes it.
    """
    tokenizer = transformers.AutoTokenizer.from_pretrained(SMOLLM2)
    lines = (ROOT / "tests" / "data" / "greedy_prompts.jsonl").read_text().splitlines()
    prompts = [
        _smollm2_prompt(tokenizer, row, **json.loads(line)) for row, line in enumerate(lines)
    ]
    assert len(prompts) == 50
    config = ModelConfig.from_hf(load_hf_config(SMOLLM2))
    engine = TrainsideEngine(Model(config), load_params(SMOLLM2, config), batch_size=25)
    sampling = Sampling(max_new_tokens=32, temperature=0.0, stop_token_ids=(2,))
    ours = engine.generate(prompts, samples=1, sampling=sampling, seed=0)
    theirs, gaps = _transformers_greedy(prompts, 32)
    ties = 0
    for trajectory, want, gap in zip(ours, theirs, gaps, strict=True):
        got = trajectory.response_ids
        if got != want:
            first = next(
                i for i, pair in enumerate(zip(got, want, strict=False)) if len(set(pair)) > 1
            )
            assert gap[first] < 1e-4, (trajectory.prompt.text, first, got, want)
            ties += 1
        assert trajectory.finish_reason == ("stop" if got[-1] == 2 else "length")
    print(f"greedy SmolLM2: {50 - ties} of 50 equal transformers, {ties} differ at a tie")
    assert ties <= 2


def _smollm2_prompt(tokenizer: Any, row: int, prompt: str, chat: bool) -> Prompt:
    if chat:
        message = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
    else:
        ids = tokenizer.encode(prompt)
    return Prompt(row=row, ids=tuple(ids), text=prompt, columns={})


def _transformers_greedy(
    prompts: Sequence[Prompt], limit: int
) -> tuple[list[tuple[int, ...]], list[list[float]]]:
    """Responses of transformers' `generate`, and the gap of its top two logits at each token."""
    # Two threads that wait for each other take many times as long where the cores are shared.
    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(SMOLLM2, dtype=torch.float32).eval()
    responses: list[tuple[int, ...]] = [()] * len(prompts)
    gaps: list[list[float]] = [[]] * len(prompts)
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i].ids))
    for chunk in (order[:25], order[25:]):
        width = max(len(prompts[i].ids) for i in chunk)
        ids = torch.zeros((len(chunk), width), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, i in enumerate(chunk):
            ids[row, width - len(prompts[i].ids) :] = torch.tensor(prompts[i].ids)
            mask[row, width - len(prompts[i].ids) :] = 1
        out = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=limit,
            do_sample=False,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        two = torch.stack(out.logits, dim=1).topk(2).values
        for row, i in enumerate(chunk):
            response = out.sequences[row, width:].tolist()
            end = response.index(2) + 1 if 2 in response else limit
            responses[i] = tuple(response[:end])
            gaps[i] = (two[row, :, 0] - two[row, :, 1]).tolist()
    return responses, gaps
