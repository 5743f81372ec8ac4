"""What an SGLang server lacks where there is no GPU; import this before sglang.

SGLang's own code runs on a CPU, but two of its packages exist for CUDA only:

- `sgl_kernel` has no build for CPUs. SGLang then takes its plain torch code for every layer, yet
  some modules still import kernels by name. Each name given here raises when it is called; that
  takes speculative decoding or moving the key-value cache, neither of which such a server does.
- `torchvision`, as published for CUDA, cannot load its operators beside a CPU torch, and its import
  then fails because two of them are unknown. It is enough that they are declared.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

os.environ["SGLANG_USE_CPU_ENGINE"] = "1"

import torch

_BOXES = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


class _AbsentKernels(ModuleType):
    """A module in which every name that ends in ``_cpu`` is a function that refuses."""

    def __getattr__(self, name: str) -> Any:
        if not name.endswith("_cpu"):
            raise AttributeError(f"{self.__name__} has no {name}: it is not installed")

        def refuse(*args: object, **kwargs: object) -> NoReturn:
            raise NotImplementedError(f"{self.__name__}.{name} exists on GPUs only")

        return refuse


def _declare_boxes() -> torch.library.Library | None:
    spec = find_spec("torchvision")
    if spec is None or spec.origin is None:
        return None
    try:
        torch.ops.load_library(str(Path(spec.origin).with_name("_C.so")))
    except OSError:
        declared = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            declared.define(name + _BOXES)
        return declared
    return None  # a build for CPUs, which has them


_kernels = _AbsentKernels("sgl_kernel")
_kernels.__spec__ = ModuleSpec("sgl_kernel", loader=None)
sys.modules["sgl_kernel"] = _kernels
declared = _declare_boxes()  # kept: the declarations live as long as this object
