"""The real model: SmolLM2-135M-Instruct reads, computes and goes out again as in transformers.

Needs models/SmolLM2-135M-Instruct; `python scripts/get_smollm2.py` makes it.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from jaxrl.checkpoint.hf import check_tokenizer_fits, load_params
from jaxrl.checkpoint.hf_export import export_hf
from tests.checkpoint.families import config_of, our_logits

FOLDER = Path(__file__).resolve().parents[2] / "models" / "SmolLM2-135M-Instruct"
QUESTIONS = (
    "What is the capital of France?",
    "Which is larger, 47 or 74?",
    "Écris un haïku: 日本語 🙂",
)


@pytest.fixture(scope="module")
def tokenizer() -> transformers.PreTrainedTokenizerBase:
    return transformers.AutoTokenizer.from_pretrained(FOLDER)


def chat(tokenizer: transformers.PreTrainedTokenizerBase, question: str) -> list[int]:
    return tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
    )


def test_logits_and_answers_are_those_of_transformers(
    tokenizer: transformers.PreTrainedTokenizerBase,
) -> None:
    config = config_of(FOLDER)
    params = load_params(FOLDER, config)
    prompts = [chat(tokenizer, question) for question in QUESTIONS]
    longest = max(map(len, prompts))
    # Padding on the right: it comes after every token that is compared.
    tokens = np.array([prompt + [0] * (longest - len(prompt)) for prompt in prompts])
    model = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    with torch.no_grad():
        first = torch.tensor([prompts[0]])
        answer = model.generate(
            first, attention_mask=torch.ones_like(first), do_sample=False, max_new_tokens=12
        )
        theirs = model.double()(torch.tensor(tokens)).logits.numpy()
    ours = our_logits(params, config, tokens)
    compared = np.arange(longest)[None] < np.array([[len(prompt)] for prompt in prompts])
    # The reference is transformers in float64. Float32 rounds in proportion to the largest logits,
    # which reach 30: in float32 transformers itself is up to 1.3e-4 away from it, and products add
    # up in another order on another processor. So errors are taken in units of those.
    scale = np.abs(theirs[compared]).max(axis=-1, keepdims=True)
    np.testing.assert_allclose(ours[compared] / scale, theirs[compared] / scale, atol=1e-5, rtol=0)
    text = tokenizer.decode(answer[0, len(prompts[0]) :])
    assert text == "The capital of France is Paris.<|im_end|>"


def test_a_bfloat16_export_is_the_file_it_came_from(tmp_path: Path) -> None:
    """Read to float32, laid out for JAX, laid back, rounded: every byte as before."""
    config = config_of(FOLDER)
    out = export_hf(
        tmp_path / "out", load_params(FOLDER, config), config, source=FOLDER, dtype="bfloat16"
    )
    before, after = (folder / "model.safetensors" for folder in (FOLDER, out))
    assert before.read_bytes() == after.read_bytes()


def test_the_tokenizer_is_smollms(tokenizer: transformers.PreTrainedTokenizerBase) -> None:
    check_tokenizer_fits(tokenizer, config_of(FOLDER))
    assert tokenizer.tokenize("a  12+345") == ["a", "ĠĠ", "1", "2", "+", "3", "4", "5"]
    text = "It's 3,141 — naïve café 日本 \n\n\t{x}"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    # No BOS of the tokenizer's own beside the one that starts the chat template's blocks.
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    blocks = f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    whole = tokenizer(blocks + "<|im_start|>assistant\n")["input_ids"]
    assert chat(tokenizer, "Hi") == whole
