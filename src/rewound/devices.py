"""Names of devices, as they are given on the command line."""

from functools import cache

import torch

from rewound.errors import InputError


def device_kind(name: str) -> str:
    """Whether that is a name of a cpu or of a cuda device, here or elsewhere."""
    try:
        kind = torch.device(name).type
    except (RuntimeError, TypeError) as error:
        raise InputError(f"unknown device {name!r}; use cpu or cuda") from error
    if kind not in ("cpu", "cuda"):
        raise InputError(f"device {name!r} is not supported; use cpu or cuda")
    return kind


@cache
def device_named(name: str) -> torch.device:
    """The device of that name, if it is there; asked for a GPU, it turns TF32 convolutions off in this process."""
    kind, device = device_kind(name), torch.device(name)
    if kind == "cuda" and not torch.cuda.is_available():
        raise InputError(f"device {name!r} is not there: torch {torch.__version__} sees no CUDA GPU; use cpu")
    if kind == "cuda":
        torch.backends.cudnn.allow_tf32 = False  # float32 means float32
    return device
