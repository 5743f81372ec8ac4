"""What the SGLang engine costs: its throughput beside that of a bare asynchronous loop.

    python scripts/bench_client.py MODEL_FOLDER http://127.0.0.1:30000

Both send the same requests to the same server, as many at once, in turn; the loop reads the replies
and checks nothing. Prints tokens a second of each and the ratio of every pair (medians of REPEATS).
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import httpx

from jaxrl.checkpoint.hf import load_hf_config, load_params
from jaxrl.config import RolloutConfig
from jaxrl.models import Model, ModelConfig
from jaxrl.rollout.sglang.engine import SGLangEngine
from jaxrl.types import Prompt, Sampling


async def bare(url: str, bodies: Sequence[dict[str, Any]], concurrency: int) -> int:
    """Tokens that come back when `concurrency` coroutines ask, one request after the other."""
    waiting, tokens = list(reversed(bodies)), 0
    limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
    async with httpx.AsyncClient(trust_env=False, limits=limits, timeout=600) as client:

        async def work() -> None:
            nonlocal tokens
            while waiting:
                reply = await client.post(url + "/generate", json=waiting.pop())
                tokens += len(reply.raise_for_status().json()["output_ids"])

        await asyncio.gather(*(work() for _ in range(concurrency)))
    return tokens


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("url")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    hf_config = load_hf_config(args.model)
    config, ends = ModelConfig.from_hf(hf_config), hf_config.get("eos_token_id") or ()
    stops = tuple(ends) if isinstance(ends, list | tuple) else (ends,)
    sampling = Sampling(max_new_tokens=args.tokens, temperature=1.0, stop_token_ids=stops)
    prompts = [
        Prompt(row=i, ids=tuple(range(3 + i % 5, 20 + i % 7)), text="", columns={})
        for i in range(args.prompts)
    ]
    rollout = RolloutConfig(engine="sglang", urls=[args.url], concurrency=args.concurrency)
    ratios = []
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(
            SGLangEngine(
                Model(config),
                rollout,
                source=args.model,
                run_dir=folder,
                probe_ids=prompts[0].ids,
                max_tokens=args.tokens + 32,
            )
        ) as engine,
    ):
        engine.publish(load_params(args.model, config), 0)
        for repeat in range(args.repeats + 1):
            requests = engine._requests(prompts, args.samples, sampling, repeat)
            bodies = [request.body() | {"rid": f"bare-{request.rid}"} for request in requests]
            start = time.perf_counter()
            bare_tokens = asyncio.run(bare(args.url, bodies, args.concurrency))
            bare_s = time.perf_counter() - start
            start = time.perf_counter()
            got = engine.generate(prompts, samples=args.samples, sampling=sampling, seed=repeat)
            own_s = time.perf_counter() - start
            own_tokens = sum(len(t.response_ids) for t in got)
            if repeat:  # the first pair fills caches and connections
                ratios.append((own_tokens / own_s) / (bare_tokens / bare_s))
                print(
                    f"bare {bare_tokens / bare_s:8.0f} tok/s   engine {own_tokens / own_s:8.0f} "
                    f"tok/s   ratio {ratios[-1]:.3f}"
                )
        retries = engine.figures()["rollout/retries"]
    print(f"median ratio {statistics.median(ratios):.3f} of {len(ratios)}, {retries:.0f} retries")
    return 0


if __name__ == "__main__":
    sys.exit(main())
