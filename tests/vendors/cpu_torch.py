"""torch-tensorrt over a CPU build of torch: what it asks of a GPU as it is imported and as it
converts a program, answered as by one of sm_89."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

PROPERTIES = SimpleNamespace(name="sm_89", major=8, minor=9, total_memory=24 << 30)


def stand_in(patch: Any) -> None:
    """`patch` is pytest's MonkeyPatch."""
    answers: dict[str, Any] = {
        "get_device_properties": PROPERTIES,
        "get_device_capability": (8, 9),
        "current_device": 0,
        "mem_get_info": (16 << 30, 24 << 30),
        "empty_cache": None,
        "synchronize": None,
    }
    for name, answer in answers.items():
        patch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    patch.setattr(torch._C, "_CudaDeviceProperties", SimpleNamespace, raising=False)
