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
from typing import Any

import numpy as np
import torch

__all__ = [
    "generator_state",
    "keyed_generator",
    "restore_generator",
    "secret_generator",
    "seeded_globals",
]

_STREAM = (1,)  # keeps sampling apart from whatever else a seed of the tests may be used for


def secret_generator(seed: int | None = None) -> np.random.Generator:
    """Returns a secret generator, from which units are sampled.

    ``torch.Generator`` on a CPU keeps only 32 bits of its seed, few enough to try them all; this is
    Philox with a 128-bit key.

    Args:
        seed: For tests only, >= 0. A run with a seed is reproducible by anybody who knows the seed
            and so carries no privacy guarantee. Without one, the operating system gives 256 bits.

    Raises:
        ValueError: ``seed`` is negative.
    """
    if seed is not None and seed < 0:
        raise ValueError(f"seed={seed} must be >= 0.")
    entropy = secrets.randbits(256) if seed is None else seed
    key = np.random.SeedSequence(entropy, spawn_key=_STREAM)
    return np.random.Generator(np.random.Philox(key))


def generator_state(generator: np.random.Generator) -> dict[str, Any]:
    """Returns the state of a secret generator as plain JSON values; a secret like the generator."""
    state = generator.bit_generator.state
    return {
        **state,
        "state": {name: array.tolist() for name, array in state["state"].items()},
        "buffer": state["buffer"].tolist(),
    }


def restore_generator(generator: np.random.Generator, state: dict[str, Any]) -> None:
    """Puts a generator into a state of :func:`generator_state`; its next draws are the same bits.

    Raises:
        ValueError: The state is not that of a Philox generator.
    """
    if state.get("bit_generator") != "Philox":
        raise ValueError(f"state['bit_generator']={state.get('bit_generator')!r} must be 'Philox'.")
    generator.bit_generator.state = {
        **state,
        "state": {name: np.array(words, dtype=np.uint64) for name, words in state["state"].items()},
        "buffer": np.array(state["buffer"], dtype=np.uint64),
    }


def keyed_generator(*material: bytes) -> np.random.Generator:
    """A generator whose stream is fixed by a secret key and what it is used for.

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
