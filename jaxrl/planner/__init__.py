"""What a run needs before it costs anything: bytes a device, FLOPs, and what would make it fit.

`analytic` counts from the real shardings at once; `compiling` asks a compiler, in a process of its
own, about the very steps that train. Neither allocates an array.
"""

from jaxrl.planner.memory import Collective, Remedy, StepMemory, Verdict
from jaxrl.planner.run_shapes import RunShapes, find_model, shapes_of
from jaxrl.planner.targets import Target, parse_bytes, parse_target
from jaxrl.planner.verdicts import plan_run

__all__ = [
    "Collective",
    "Remedy",
    "RunShapes",
    "StepMemory",
    "Target",
    "Verdict",
    "find_model",
    "parse_bytes",
    "parse_target",
    "plan_run",
    "shapes_of",
]
