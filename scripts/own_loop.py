"""A PPO loop of one's own: `import jaxrl` for the maths, any forward function for the model.

The model is a bigram table with a critic table beside it; it learns to count upwards modulo 10.
Run: python scripts/own_loop.py
"""

import jax
import jax.numpy as jnp

import jaxrl

VOCAB, ROWS, LENGTH, LR = 10, 64, 8, 1.0


def forward(params: dict, before: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Hidden states and values of the states before each token."""
    return params["embed"][before], params["value"][before]


def rollout(params: dict, key: jax.Array) -> jax.Array:
    """Tokens [ROWS, LENGTH + 1], sampled from the policy after a random first one."""
    first_key, *keys = jax.random.split(key, LENGTH + 1)
    tokens = [jax.random.randint(first_key, (ROWS,), 0, VOCAB)]
    for step_key in keys:
        logits = params["embed"][tokens[-1]] @ params["head"]
        tokens.append(jax.random.categorical(step_key, logits))
    return jnp.stack(tokens, axis=-1)


def loss(params: dict, tokens: jax.Array, old: tuple, advantages: jax.Array, returns: jax.Array):
    """Clipped policy loss plus clipped value loss, averaged over tokens."""
    mask = jnp.ones(advantages.shape, bool)
    hidden, values = forward(params, tokens[:, :-1])
    logprobs = jaxrl.token_logprobs(hidden, params["head"], tokens[:, 1:], chunk_size=4)
    policy = jaxrl.ppo_policy_loss(logprobs, old[0], advantages, mask=mask).per_token
    value = jaxrl.ppo_value_loss(values, old[1], returns, mask=mask).per_token
    return jaxrl.aggregate(policy + 0.5 * value, mask, mode="token-mean")


@jax.jit
def iterate(params: dict, key: jax.Array) -> tuple[dict, jax.Array]:
    """Sample, score, estimate advantages, take two gradient steps."""
    tokens = rollout(params, key)
    hidden, values = forward(params, tokens[:, :-1])
    old = (jaxrl.token_logprobs(hidden, params["head"], tokens[:, 1:], chunk_size=4), values)
    rewards = (tokens[:, 1:] == (tokens[:, :-1] + 1) % VOCAB).astype(jnp.float32)
    mask = jnp.ones(rewards.shape, bool)
    advantages, returns = jaxrl.gae(rewards, values, mask, gamma=0.5, lam=0.9)
    advantages = jaxrl.whiten(advantages, mask)
    for _ in range(2):
        grads = jax.grad(loss)(params, tokens, old, advantages, returns)
        params = jax.tree.map(lambda p, g: p - LR * g, params, grads)
    return params, rewards.mean()


def main(iterations: int = 200) -> list[float]:
    """Mean reward a token of each iteration; chance is .1."""
    keys = jax.random.split(jax.random.key(0), iterations + 2)
    params = {
        "embed": 0.3 * jax.random.normal(keys[-1], (VOCAB, 16)),
        "head": 0.3 * jax.random.normal(keys[-2], (16, VOCAB)),
        "value": jnp.zeros(VOCAB),
    }
    rewards = []
    for key in keys[:iterations]:
        params, reward = iterate(params, key)
        rewards.append(float(reward))
    print(f"mean reward a token: first {rewards[0]:.2f}, last {rewards[-1]:.2f}")
    return rewards


if __name__ == "__main__":
    main()
