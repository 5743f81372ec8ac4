"""Torch: steps of TRL's PPO trainer, one with its later head in tiles, transformers' sampler."""
# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import peer_command
import torch
from bench_inputs import Sizes, drawn, model_config, sampled_prompts, tensor_shapes, token_rows
from bench_inputs import tensors as drawn_tensors
from bench_timing import Work
from transformers import (
    AutoModelForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
)

PAD = 0  # none of the inputs holds an id below 3
SMOLLM2 = Path(__file__).resolve().parents[2] / "models" / "SmolLM2-135M-Instruct"


def model_of(sizes: Sizes, *, critic: bool = False) -> Any:
    """The drawn weights in transformers' Qwen3; a critic's one output starts at zero, as ours."""
    config = Qwen3Config.from_dict(model_config(sizes) | {"pad_token_id": PAD, "num_labels": 1})
    tensors = {k: torch.from_numpy(v) for k, v in drawn_tensors(tensor_shapes(sizes)).items()}
    model = (Qwen3ForSequenceClassification if critic else Qwen3ForCausalLM)(config)
    if critic:
        del tensors["lm_head.weight"]
        tensors["score.weight"] = torch.zeros(1, sizes.hidden)
    model.load_state_dict(tensors)
    return model.train()


def smollm2() -> str:
    """The folder, which has to be there."""
    if not (SMOLLM2 / "model.safetensors").is_file():
        raise SystemExit(f"{SMOLLM2} is missing; make it with python scripts/get_smollm2.py")
    return str(SMOLLM2)


def clipped(sizes: Sizes, old: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """PPO's policy loss over all response tokens, given the new log-probabilities."""
    advantages = torch.from_numpy(drawn(sizes).advantages)

    def loss(new: torch.Tensor) -> torch.Tensor:
        ratio = torch.exp(new - old)
        return -torch.min(advantages * ratio, advantages * ratio.clamp(0.8, 1.2)).mean()

    return loss


def of_step(
    model: Any, loss_of: Callable[[], tuple[torch.Tensor, Any]], after: Callable[[Any], Any]
) -> Work:
    """Loss, gradient, AdamW, and what the trainer looks at afterwards."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=1e-4)

    def gradient() -> tuple[float, Any]:
        loss, seen = loss_of()
        loss.backward()
        return loss.item(), seen

    loss, _ = gradient()
    check = {"loss": loss, "gradient_norm": norm(model.parameters())}
    optimizer.zero_grad()

    def call() -> None:
        _, seen = gradient()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            after(seen)

    return Work(call, 0, lambda _: check, 0)


def norm(parameters: Iterator[torch.nn.Parameter]) -> float:
    """Length of the whole gradient."""
    return float(torch.stack([p.grad.norm() for p in parameters if p.grad is not None]).norm())


def policy_step(sizes: Sizes) -> Work:
    """As TRL 1.12's PPO trainer: logits everywhere, its log-softmax, its statistics."""
    from trl.experimental.ppo import ppo_trainer

    model, ids = model_of(sizes), torch.from_numpy(token_rows(sizes)).long()
    response = ids[:, sizes.prompt :]

    def score() -> tuple[torch.Tensor, torch.Tensor]:
        logits = ppo_trainer.forward(model, ids, PAD).logits[:, sizes.prompt - 1 : -1]
        logits /= 1.0 + 1e-7
        return ppo_trainer.selective_log_softmax(logits, response), logits

    with torch.no_grad():
        old = score()[0] + 0.1 * torch.from_numpy(drawn(sizes).noise)
    policy_loss = clipped(sizes, old)

    def loss() -> tuple[torch.Tensor, torch.Tensor]:
        new, logits = score()
        return policy_loss(new), logits.detach()

    def entropy(logits: torch.Tensor) -> torch.Tensor:
        likely = torch.nn.functional.softmax(logits, dim=-1)
        return torch.logsumexp(logits, dim=-1) - torch.sum(likely * logits, dim=-1)

    return of_step(model, loss, entropy)._replace(tokens=ids.numel())


def policy_step_chunked(sizes: Sizes) -> Work:
    """With TRL 1.16's head in tiles of 2048 words, at the response tokens alone."""
    from trl.kernels import ChunkedLogProbFunction

    model, ids = model_of(sizes), torch.from_numpy(token_rows(sizes)).long()
    targets = ids[:, sizes.prompt :].reshape(-1)

    def score() -> torch.Tensor:
        hidden = model.model(ids, use_cache=False).last_hidden_state[:, sizes.prompt - 1 : -1]
        flat = hidden.reshape(-1, sizes.hidden)
        head = model.lm_head.weight
        out = ChunkedLogProbFunction.apply(flat, head, None, targets, 1.0, 2048, None, 1.0, ())
        return out[0].view(sizes.rows, sizes.response)

    with torch.no_grad():
        old = score() + 0.1 * torch.from_numpy(drawn(sizes).noise)
    policy_loss = clipped(sizes, old)
    work = of_step(model, lambda: (policy_loss(score()), None), lambda _: None)
    return work._replace(tokens=ids.numel())


def critic_step(sizes: Sizes) -> Work:
    """As the same trainer, with a sequence classifier."""
    from trl.experimental.ppo import ppo_trainer

    model, ids = model_of(sizes, critic=True), torch.from_numpy(token_rows(sizes)).long()
    draws = drawn(sizes)
    returns, old = torch.from_numpy(draws.returns), torch.from_numpy(draws.values)

    def loss() -> tuple[torch.Tensor, None]:
        hidden = ppo_trainer.forward(model.model, ids, PAD).hidden_states[-1]
        values = model.score(hidden)[:, sizes.prompt - 1 : -1].squeeze(-1)
        near = torch.clamp(values, old - 0.2, old + 0.2)
        errors = torch.max(torch.square(values - returns), torch.square(near - returns))
        return 0.5 * errors.mean(), None

    return of_step(model, loss, lambda _: None)._replace(tokens=ids.numel())


def generating(model: Any, sizes: Sizes) -> Work:
    """Transformers' sampler; no stop token, so all rows run on."""
    ids = torch.from_numpy(sampled_prompts(sizes)).long()
    settings: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    model.eval().generation_config.eos_token_id = None

    def call() -> np.ndarray:
        torch.manual_seed(0)
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=sizes.sampled_new,
            pad_token_id=PAD,
            **settings,
        )
        return out[:, ids.shape[1] :].numpy()

    new = sizes.sampled_rows * sizes.sampled_new
    return Work(call, 0, lambda out: {"new_tokens": float(out.size)}, new)


def sampler(sizes: Sizes) -> Work:
    """Of the drawn model."""
    return generating(model_of(sizes), sizes)


def sampler_smollm2(sizes: Sizes) -> Work:
    """Of SmolLM2 in float32."""
    model = AutoModelForCausalLM.from_pretrained(smollm2(), dtype=torch.float32)
    return generating(model, replace(sizes, vocab=model.config.vocab_size))


def iteration_smollm2(sizes: Sizes) -> Work:
    """A whole iteration of TRL 1.12's PPO trainer."""
    from trl_iteration import iteration

    return iteration(smollm2(), rows=16 if sizes == Sizes() else 4)


if __name__ == "__main__":
    torch.set_num_threads(1)
    peer_command.main(
        {
            "policy_step": policy_step,
            "policy_step_chunked": policy_step_chunked,
            "critic_step": critic_step,
            "sampler": sampler,
            "sampler_smollm2": sampler_smollm2,
            "iteration_smollm2": iteration_smollm2,
        },
        ("torch", "transformers", "trl", "numpy"),
        lambda result: result,
    )
