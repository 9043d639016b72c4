"""Where secret randomness comes from, and what keeps it apart from the public generators.

Receives entropy of the operating system, or keys made from it; returns generators.

Guarantees:
    Nothing here reads ``args.seed`` or the global generators of ``torch``, ``numpy`` or ``random``.

What the guarantee leaves out: Philox is a statistical generator, not a cryptographic one. Its
128-bit key is beyond search, but nothing proves that somebody who sees part of its output (exact
noise, that is exact sums) cannot foretell the rest.
"""

from __future__ import annotations

import hashlib
import random
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

__all__ = ["keyed_generator", "new_key", "seeded_globals"]


def new_key(seed: int | None = None) -> bytes:
    """Return 256 secret bits of the operating system, from which all randomness of a run is made.

    Args:
        seed: For tests only, >= 0. Whoever knows it can repeat the run, which therefore carries no
            guarantee.

    Raises:
        ValueError: If ``seed`` is not in [0, 2^256).
    """
    if seed is None:
        return secrets.token_bytes(32)
    if not 0 <= seed < 2**256:
        raise ValueError(f"noise_seed={seed} must be in [0, 2^256).")
    return seed.to_bytes(32, "big")


def keyed_generator(*material: bytes) -> np.random.Generator:
    """Return a generator whose stream is fixed by a secret key and what it is used for.

    Args:
        material: The key first, then the use. Equal material gives the equal stream, and any other
            an independent one (SHA-256 as a pseudo-random function).
    """
    lengths = b"".join(len(part).to_bytes(8, "big") for part in material)
    digest = hashlib.sha256(lengths + b"".join(material)).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "big")))


@contextmanager
def seeded_globals(seed: int, *, devices: Sequence[int] = ()) -> Iterator[None]:
    """Seed the global generators for a while, and put them back.

    Args:
        seed: In [0, 2^63). On a CPU ``torch`` keeps 32 bits of it.
        devices: Indices of CUDA devices whose generators are seeded, too.
    """
    words = [seed >> 32, seed & 0xFFFFFFFF]
    python, legacy = random.getstate(), np.random.get_state()  # noqa: NPY002 - what others draw from
    with torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(seed)
        for device in devices:
            torch.cuda.default_generators[device].manual_seed(seed)
        np.random.seed(words)  # noqa: NPY002
        random.seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(legacy)  # noqa: NPY002
