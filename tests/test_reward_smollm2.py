"""A classifier on the real SmolLM2: its tokenizer, its chat template, its size.

Needs models/SmolLM2-135M-Instruct; `python scripts/get_smollm2.py` makes it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from jaxrl.config import RewardModelConfig
from jaxrl.reward_model import RewardModel
from jaxrl.reward_request import Asked
from jaxrl.types import Prompt

SMOLLM2 = Path(__file__).resolve().parents[1] / "models" / "SmolLM2-135M-Instruct"
CHATS = [
    ("What is 47 + 35?", "82"),
    ("What is the capital of France?", "The capital of France is Paris, on the Seine."),
    ("Écris un haïku: 日本語 🙂", "non"),
]


def test_scores_of_chats_are_those_of_transformers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model: Any = transformers.AutoModelForSequenceClassification.from_pretrained(
        SMOLLM2, num_labels=1, dtype=torch.bfloat16
    )
    model.score.weight.data = torch.randn(1, model.config.hidden_size, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(SMOLLM2)
    tokenizer.save_pretrained(tmp_path)
    model = model.float().eval()
    model.config.pad_token_id = None  # the last token is read, whatever it is

    prompts, expected = [], []
    for i, (question, answer) in enumerate(CHATS):
        messages = [{"role": "user", "content": question}]
        whole = [*messages, {"role": "assistant", "content": answer}]
        ids = tokenizer.apply_chat_template(whole, return_dict=False)
        with torch.no_grad():
            expected.append(float(model(torch.tensor([ids])).logits[0, 0]))
        prompts.append(Prompt(row=i, ids=(1,), text=question, messages=tuple(messages), columns={}))
    ours = RewardModel(RewardModelConfig(path=str(tmp_path)), key="reward.models[0]")
    (scores,) = ours.ask(Asked(prompts, [answer for _, answer in CHATS], [[1]] * len(CHATS)))
    np.testing.assert_allclose(np.array(scores, float), expected, rtol=1e-4, atol=1e-3)
    assert np.ptp(expected) > 0.1
