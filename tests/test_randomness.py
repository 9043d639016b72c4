"""All randomness of a run has as many secret bits as its key, and none of a public seed."""

from __future__ import annotations

import random
from functools import reduce
from operator import and_, or_

import numpy as np
import pytest
import torch

from hf_dpmuon.randomness import keyed_generator, new_key


def both_values(words: list[int]) -> int:
    """The bits that are set in some words and not in others."""
    return reduce(or_, words) & ~reduce(and_, words)


def philox_key(*material: bytes) -> int:
    low, high = keyed_generator(*material).bit_generator.state["state"]["key"].tolist()
    return low | high << 64


def test_all_256_bits_of_a_new_key_vary():
    keys = [int.from_bytes(new_key(), "big") for _ in range(100)]
    assert both_values(keys) == 2**256 - 1


def test_a_new_key_ignores_the_public_generators():
    keys = []
    for _ in range(2):
        torch.manual_seed(42)
        np.random.seed(42)
        random.seed(42)
        keys.append(new_key())
    assert keys[0] != keys[1]


def test_all_128_bits_of_a_stream_s_key_vary():
    keys = [philox_key(new_key(0), str(i).encode()) for i in range(100)]
    assert both_values(keys) == 2**128 - 1


@pytest.mark.parametrize("bit", [0, 31, 32, 63, 64, 127, 128, 255])
def test_each_bit_of_a_key_decides_the_stream(bit):
    assert philox_key(new_key(0), b"use") != philox_key(new_key(1 << bit), b"use")


def test_keys_and_uses_that_read_alike_when_joined_are_not_the_same():
    first, second = (
        keyed_generator(*parts).integers(2**63) for parts in ((b"ab", b"c"), (b"a", b"bc"))
    )
    assert first != second
