"""The rows of the table of `bench_table.py`: what is compared, and what is to be reached."""

from __future__ import annotations

from typing import NamedTuple

MIB = 2**20
# A time within this of the matrix products a step consists of counts as reached.
OF_PRODUCTS = 1.2


class Peer(NamedTuple):
    """A library that is measured, in the environment of its name."""

    title: str
    program: str
    memory: str = "peak_rss_bytes"


PEERS = {
    "tokamax": Peer("tokamax", "tokamax_sections.py", "temp_bytes"),
    "tunix": Peer("Tunix", "tunix_sections.py", "temp_bytes"),
    "trl": Peer("TRL's PPO trainer, transformers", "torch_sections.py"),
    "trl-chunked": Peer("TRL's later head", "torch_sections.py"),
}
OURS = "jaxrl"
PRODUCTS = "products"


class Limit(NamedTuple):
    """What a figure of ours may be at most."""

    times: float
    of: tuple[str, ...]
    """The sides whose least figure that is times of; "products" are the row's own; empty: MiB."""


class Row(NamedTuple):
    """One piece of work, done by us and by those who can."""

    work: str
    ours: str
    """Our section of `bench.py`."""
    others: dict[str, str]
    """Sides and their sections; a side is a peer, or "ours: NAME" for another section of ours."""
    time: Limit
    memory: Limit | None = None
    memory_is: str = "temp_bytes"
    """What the limit on memory is about: XLA's temporaries, or the peak of the whole process."""
    products: tuple[str, int] | None = None
    """Our section of a matrix product of the step, and how many of them the step consists of."""
    rounds: int = 3
    repeats: int = 3
    """Timed calls in each process, after one that may compile; 0 times that one."""
    peers_repeats: int | None = None
    """The peers' where it differs: of long calls in a library that compiles nothing."""
    part_of: tuple[str, str] | None = None
    """The row it is measured in, and its side there that is ours here."""


ROWS = {
    "head": Row(
        "log-prob head, forward + gradient, 4096 x 256 x 32768",
        "head_gradient",
        {"tokamax": "head_gradient"},
        Limit(1.0, ("tokamax",)),
        Limit(16, ()),
        products=("head_products", 4),
    ),
    "head_entropy": Row(
        "same, with entropy and its gradient",
        "head_entropy_gradient",
        {"ours: without": "head_gradient"},
        Limit(1.15, ("ours: without",)),
        products=("head_products", 4),
    ),
    "head_large": Row(
        "log-prob head, forward + gradient, 8192 x 1024 x 151936",
        "head_large_gradient",
        {},
        Limit(1.15, ("products",)),
        Limit(64, ()),
        products=("head_large_products", 4),
        rounds=5,
        repeats=0,
    ),
    "policy_step": Row(
        "PPO policy step, 20.7M Qwen3, 8 x 512",
        "policy_step",
        {"trl-chunked": "policy_step_chunked", "trl": "policy_step", "tunix": "policy_step"},
        Limit(0.8, ("trl-chunked", "trl", "tunix")),
        Limit(0.15, ("tunix",)),
        products=("policy_step_products", 1),
    ),
    "critic_step": Row(
        "critic step, own trunk",
        "critic_step",
        {"trl": "critic_step", "tunix": "critic_step"},
        Limit(0.9, ("trl",)),
        Limit(0.25, ("tunix",)),
        products=("critic_step_products", 1),
    ),
    "sampler": Row(
        "sampler, 32 x (32 + 64), 20.7M",
        "sampler",
        {"trl": "sampler", "tunix": "sampler"},
        Limit(0.4, ("trl", "tunix")),
        products=("sampler_products", 1),
    ),
    "sampler_smollm2": Row(
        "sampler, 32 x (32 + 64), SmolLM2 float32",
        "sampler_smollm2",
        {"trl": "sampler_smollm2"},
        Limit(0.65, ("trl",)),
        products=("sampler_smollm2_products", 1),
    ),
    "gae": Row(
        "GAE [256, 8192], masks and whitening",
        "gae_large",
        {"tunix": "gae_large"},
        Limit(0.8, ("tunix",)),
        repeats=25,
    ),
    "gae_small": Row(
        "GAE [64, 1024], masks and whitening",
        "gae_small",
        {"tunix": "gae_small"},
        Limit(0.8, ("tunix",)),
        repeats=25,
    ),
    "iteration": Row(
        "PPO iteration, SmolLM2 float32, 989 ragged response tokens, critic of its own",
        "iteration_smollm2",
        {"ours: head": "iteration_smollm2_head", "trl": "iteration_smollm2"},
        Limit(0.35, ("trl",)),
        Limit(0.65, ("trl",)),
        memory_is="peak_rss_bytes",
        rounds=5,
        repeats=1,
        peers_repeats=0,
    ),
    "iteration_head": Row(
        "same, our critic a head on the policy's trunk",
        "iteration_smollm2_head",
        {"trl": "iteration_smollm2"},
        Limit(0.35, ("trl",)),
        Limit(0.5, ("trl",)),
        memory_is="peak_rss_bytes",
        part_of=("iteration", "ours: head"),
    ),
}
