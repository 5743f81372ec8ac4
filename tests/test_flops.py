"""Model FLOPs against a count by hand."""

from __future__ import annotations

from jaxrl.config_io import load_config
from jaxrl.flops import iteration_flops, layer_parameters, sequence_flops
from jaxrl.models import ModelConfig
from jaxrl.types import Prompt, Trajectory

MODEL = ModelConfig(
    model_type="llama",
    vocab_size=10,
    hidden_size=4,
    intermediate_size=6,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=2,
    tie_word_embeddings=True,
    max_position_embeddings=32,
)
# A layer: q 4x4, k and v 4x2 each, o 4x4, gate, up and down 4x6 each, two norms of 4.
LAYER = 16 + 8 + 8 + 16 + 3 * 24 + 8


def test_a_sequence_by_hand():
    assert layer_parameters(MODEL) == 2 * LAYER
    # 3 tokens see 1 + 2 + 3 keys; 2 heads of 2, 2 layers, scores and mixing; head at 2 tokens.
    assert sequence_flops(MODEL, 3, 2) == 2 * 2 * LAYER * 3 + 4 * 2 * 4 * 6 + 2 * 4 * 10 * 2


def test_an_iteration_counts_a_shared_prompt_once():
    prompt = Prompt(row=0, ids=(1, 2), text="", columns={})
    pair = [
        Trajectory(
            prompt=prompt,
            sample=i,
            response_ids=(3,),
            logprobs=(0.0,),
            finish_reason="stop",
        )
        for i in range(2)
    ]
    alone = sequence_flops(MODEL, 3, 1)
    shared = 2 * alone - sequence_flops(MODEL, 2, 0)
    options = ["model.path=x", "rollout.samples=2", "rollout.prompts=1"]
    counted = iteration_flops(load_config([], options), MODEL, pair)
    assert counted == {"rollout": shared, "score": shared, "update": 3 * shared}
    more = ["packing.share_prompts=false", "critic.kind=model", "algorithm.kl_in=report"]
    counted = iteration_flops(load_config([], options + more), MODEL, pair)
    trunk = 2 * sequence_flops(MODEL, 3, 0)
    assert counted["score"] == 4 * alone + trunk
    assert counted["update"] == 3 * (2 * alone + trunk)
