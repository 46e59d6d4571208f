"""Random numbers as a function of where they are used, never of what was drawn before.

Law 1 (composition) needs every draw to depend only on (trial seed, prunings so far, steps since the last one). `fold`
turns such a path into a 64-bit key; `integers` and `permutation` are counter-based draws under a key, made of integer
tensor operations alone, so that they give the same numbers on every device and inside a captured graph.
"""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

# splitmix64's constants (Steele, Lea, Flood 2014), as the signed 64-bit integers torch computes with.
_GAMMA, _MIX_1, _MIX_2 = (c - (1 << 64) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def fold(*path: int | str) -> int:
    """A key in [0, 2**63) that is a function of the path.

    >>> fold(1, "init") == fold(1, "init") != fold(2, "init")
    True
    """
    digest = hashlib.blake2b(repr(path).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def bits(key: int | Tensor, counters: Tensor) -> Tensor:
    """One 63-bit non-negative integer per counter, as splitmix64 gives for `key + counter` steps."""
    x = (counters.to(torch.int64) + 1) * _GAMMA + key
    x = (x ^ _shifted(x, 30)) * _MIX_1
    x = (x ^ _shifted(x, 27)) * _MIX_2
    return (x ^ _shifted(x, 31)) & ((1 << 63) - 1)


def _shifted(x: Tensor, by: int) -> Tensor:
    return (x >> by) & ((1 << (64 - by)) - 1)  # torch shifts int64 arithmetically; the mask makes it logical


def integers(key: int | Tensor, counters: Tensor, high: int | Tensor) -> Tensor:
    """One integer in [0, high) per counter; the bias of the remainder is below high / 2**63.

    >>> integers(7, torch.arange(6), 3).tolist()
    [0, 0, 1, 1, 1, 0]
    """
    return bits(key, counters) % high


def permutation(key: int, n: int, device: torch.device | str = "cpu") -> Tensor:
    """A random permutation of range(n).

    >>> sorted(permutation(3, 5).tolist())
    [0, 1, 2, 3, 4]
    """
    return torch.argsort(bits(key, torch.arange(n, device=device)), stable=True)


@contextmanager
def own_draws(device: torch.device, seed: int | None = None) -> Iterator[None]:
    """Inside, torch's own generators may be drawn from, from `seed` on; afterwards they stand where they stood.

    >>> with own_draws(torch.device("cpu"), seed=1):
    ...     inside = torch.rand(2)
    >>> torch.equal(inside, torch.rand(2, generator=torch.Generator().manual_seed(1)))
    True
    """
    # Not torch.manual_seed: it takes 0.2 ms, which is a lot in every step, and seeds all GPUs for good.
    gpus = [torch.cuda.current_device() if device.index is None else device.index] if device.type == "cuda" else []
    with torch.random.fork_rng(gpus):
        if seed is not None:
            for generator in (torch.default_generator, *(torch.cuda.default_generators[gpu] for gpu in gpus)):
                generator.manual_seed(seed)
        yield


@contextmanager
def all_draws(device: torch.device, seed: int) -> Iterator[None]:
    """`own_draws` of Python's and numpy's generators, too: for code that may draw from any.

    >>> before = random.getstate()
    >>> with all_draws(torch.device("cpu"), seed=1):
    ...     inside = random.random(), np.random.rand()
    >>> with all_draws(torch.device("cpu"), seed=1):
    ...     assert inside == (random.random(), np.random.rand())
    >>> random.getstate() == before
    True
    """
    python, of_numpy = random.getstate(), np.random.get_state()  # noqa: NPY002, as code that draws from it does
    try:
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        with own_draws(device, seed):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(of_numpy)  # noqa: NPY002
