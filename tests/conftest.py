"""What all tests share: CPU unless told otherwise, and no silent broadcasting between ranks."""

from __future__ import annotations

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import hypothesis
import jax

jax.config.update("jax_numpy_rank_promotion", "raise")

# The same examples on every machine; a compilation inside an example is no reason to fail.
hypothesis.settings.register_profile("jaxrl", deadline=None, derandomize=True, max_examples=40)
hypothesis.settings.load_profile("jaxrl")
