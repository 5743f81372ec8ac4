"""The loop of one's own: only `import jaxrl`, a forward that is not ours, and it learns."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "scripts/own_loop.py"


def test_the_loop_learns_and_loads_no_more_than_jax():
    code = (
        f"import runpy, sys; own = runpy.run_path({str(SCRIPT)!r}); rewards = own['main']();"
        "assert rewards[0] < 0.25 and rewards[-1] > 0.8, rewards;"
        "heavy = {'flax', 'optax', 'orbax', 'transformers', 'torch'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "import jaxrl\n" in SCRIPT.read_text() and "from jaxrl" not in SCRIPT.read_text()
