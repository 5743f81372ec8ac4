"""One whole iteration of TRL's PPO trainer on the ragged batch, and where its CPU seconds go."""
# pyright: reportMissingImports=false

from __future__ import annotations

import tempfile
import time
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from bench_inputs import ragged_batch
from bench_timing import Work
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LogitsProcessor,
    LogitsProcessorList,
)
from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer

# The functions whose calls begin the trainer's stages, in their order: the first `forward` is the
# reference's, the next one the update's.
STAGES = {
    "generate_s": "batch_generation",
    "reference_s": "forward",
    "values_s": "get_reward",
    "update_s": "forward",
}


class EndsAt(LogitsProcessor):
    """Lets each row end where it is to end, and nowhere else."""

    def __init__(self, begin: int, lengths: list[int], end: int, pad: int) -> None:
        """Responses begin at column `begin`; `lengths` include the end."""
        self.begin, self.lengths = begin, torch.tensor(lengths)
        self.end, self.pad = end, pad

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """The end alone at a row's last token; neither end nor padding before it."""
        scores[:, [self.end, self.pad]] = -torch.inf
        last = self.lengths == input_ids.shape[1] - self.begin + 1
        scores[last] = -torch.inf
        scores[last, self.end] = 0.0
        return scores


def force_lengths(policy: Any, lengths: dict[tuple[int, ...], int], end: int, pad: int) -> None:
    """Make the policy's own `generate` give each prompt a response of its length."""
    generate = policy.generate

    def forced(input_ids: torch.Tensor, attention_mask: torch.Tensor, **settings: Any) -> Any:
        rows = zip(input_ids, attention_mask, strict=True)
        of_rows = [lengths[tuple(ids[mask.bool()].tolist())] for ids, mask in rows]
        ends = EndsAt(input_ids.shape[1], of_rows, end, pad)
        return generate(
            input_ids=input_ids,
            attention_mask=attention_mask,
            logits_processor=LogitsProcessorList([ends]),
            eos_token_id=end,
            pad_token_id=pad,
            **settings,
        )

    policy.generate = forced


class FreeReward(torch.nn.Module):
    """A reward that costs nothing, in the shape of a classifier: by the last token's id."""

    base_model_prefix = "trunk"

    def __init__(self) -> None:
        """The trunk hands on the ids."""
        super().__init__()
        self.trunk = lambda input_ids, **_: SimpleNamespace(hidden_states=[input_ids])

    def score(self, ids: torch.Tensor) -> torch.Tensor:
        """One figure a token."""
        return (ids % 7).float().unsqueeze(-1)


class Called(NamedTuple):
    """A call of one of the trainer's functions."""

    name: str
    at: float
    """CPU seconds of the process before it."""
    tokens: Any
    """Its second argument: the rows, prompts alone for the generation."""


def note_calls() -> list[Called]:
    """Have the trainer's module note each call of the functions that begin its stages."""
    calls: list[Called] = []

    def note(name: str) -> None:
        function = getattr(ppo_trainer, name)

        def noted(*arguments: Any, **named: Any) -> Any:
            calls.append(Called(name, time.process_time(), arguments[1]))
            return function(*arguments, **named)

        setattr(ppo_trainer, name, noted)

    for name in set(STAGES.values()):
        note(name)
    return calls


def seconds(calls: list[Called], end: float) -> dict[str, float]:
    """CPU seconds of each stage; scoring the samples counts as generation."""
    left = iter(calls)
    begins = [next(c.at for c in left if c.name == name) for name in STAGES.values()]
    ends = [*begins[1:], end]
    return {stage: b - a for stage, a, b in zip(STAGES, begins, ends, strict=True)}


def response_tokens(calls: list[Called], pad: int) -> float:
    """Tokens that the reference saw and the generation was not given."""
    seen = {call.name: int((call.tokens != pad).sum()) for call in reversed(calls)}
    return float(seen["forward"] - seen["batch_generation"])


def settings(folder: str, rows: int, longest: int) -> PPOConfig:
    """All rows generated and scored at once, then updated two at a time; no checkpointing."""
    return PPOConfig(
        output_dir=folder,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=rows // 2,
        local_rollout_forward_batch_size=rows,
        num_mini_batches=1,
        num_ppo_epochs=1,
        total_episodes=rows,
        response_length=longest,
        stop_token="eos",
        temperature=1.0,
        learning_rate=1e-6,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        num_sample_generations=0,
        save_strategy="no",
        report_to="none",
    )


def iteration(folder: str, rows: int) -> Work:
    """Generate, reference, values, one epoch of updates; float32, the critic with its own trunk."""
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    tokenizer.pad_token = "<|endoftext|>"  # what it pads with else is its end of turn
    batch = ragged_batch(rows, len(tokenizer))
    policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    critic = AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=1, dtype=torch.float32
    )
    lengths = dict(zip(map(tuple, batch.prompts), batch.response_lengths, strict=True))
    force_lengths(policy, lengths, tokenizer.eos_token_id, tokenizer.pad_token_id)
    trainer = PPOTrainer(
        args=settings(tempfile.mkdtemp(), rows, max(batch.response_lengths)),
        processing_class=tokenizer,
        model=policy,
        ref_model=None,
        reward_model=FreeReward(),
        value_model=critic,
        train_dataset=Dataset.from_dict({"input_ids": batch.prompts}),
    )
    calls, stages = note_calls(), {}

    def call() -> float:
        calls.clear()
        trainer.train()
        stages.update(seconds(calls, time.process_time()))
        return response_tokens(calls, tokenizer.pad_token_id)

    tokens = sum(batch.response_lengths)
    return Work(call, 0, lambda out: {"response_tokens": out}, tokens, lambda: stages)
