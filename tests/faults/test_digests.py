"""Digests of tensors: those of a plain loop, and other ones wherever a bit differs."""

import random
import time

import numpy as np
import pytest
import torch

from fastsync.reducer import core

BLOCK, LANES = 1 << 15, 32
FACTOR = np.uint64(0x243F6A8885A308D3)


def stepped(digest, word):
    with np.errstate(over="ignore"):
        mixed = (digest ^ word) * FACTOR
    return mixed ^ (mixed >> np.uint64(32))


def folded(digests, nbytes):
    result = np.uint64(nbytes)
    for digest in digests:
        result = stepped(result, digest)
    return result


def of_block(data):
    whole = data + bytes(-len(data) % (8 * LANES))
    lanes = np.zeros(LANES, dtype=np.uint64)
    for row in np.frombuffer(whole, dtype=np.uint64).reshape(-1, LANES):
        lanes = stepped(lanes, row)
    return folded(lanes, len(data))


def plain(tensor):
    """By rows, as the definition reads."""
    dense = tensor.resolve_conj().resolve_neg().contiguous().view(-1)
    data = dense.view(torch.uint8).numpy().tobytes()
    blocks = [of_block(data[i : i + BLOCK]) for i in range(0, len(data), BLOCK)]
    return int(folded(blocks, len(data)).astype(np.int64))


def tensors():
    generator = torch.Generator().manual_seed(3)
    base = torch.randn(70, 90, generator=generator)
    return [
        torch.randn(30_011, generator=generator),
        torch.randn(BLOCK // 4, generator=generator),
        base.t(),
        base[::2, 1::3],
        base.bfloat16().view(-1)[1:],
        base.half()[3:],
        base.double(),
        base > 0,
        torch.randn(7, dtype=torch.complex64, generator=generator).conj(),
        torch.full((3,), float("nan")),
        torch.empty(0),
        torch.tensor(3.0),
    ]


def test_digests_are_those_of_the_plain_loop():
    assert core.digests(tensors()) == [plain(t) for t in tensors()]
    assert core.digests([]) == []


def test_digests_do_not_depend_on_threads_nor_on_memory():
    before = torch.get_num_threads()
    large = torch.randn(1_000_003, generator=torch.Generator().manual_seed(1))
    try:
        found = []
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(core.digests([large, *tensors()]))
    finally:
        torch.set_num_threads(before)
    assert found[0] == found[1]
    images = torch.randn(4, 3, 5, 7)
    assert core.digests([images]) == core.digests([images.to(memory_format=torch.channels_last)])


def flip(tensor, byte, bit):
    tensor.view(-1).view(torch.uint8)[byte] ^= 1 << bit


@pytest.mark.parametrize("numel", [1, 63, 64, 8192, 20_001])
def test_any_flipped_bit_changes_it(numel):
    rng = random.Random(seed := time.time_ns())
    print(f"seed {seed}")
    tensor = torch.randn(numel)
    before = core.digests([tensor])
    for _ in range(200):
        byte, bit = rng.randrange(4 * numel), rng.randrange(8)
        flip(tensor, byte, bit)
        assert core.digests([tensor]) != before
        flip(tensor, byte, bit)
    assert core.digests([tensor]) == before


def test_changes_do_not_cancel_out():
    """Signs of two elements, of all, two that change places, and zeros at the end."""
    tensor = torch.randn(4096, generator=torch.Generator().manual_seed(2))
    before = core.digests([tensor])
    for first, second in ((1, 3), (1, 65), (1, 4095), (64, 128)):
        changed = tensor.clone()
        changed[[first, second]] *= -1
        swapped = tensor.clone()
        swapped[[first, second]] = tensor[[second, first]]
        assert before not in (core.digests([changed]), core.digests([swapped]))
    others = [-tensor, tensor.flip(0), tensor[:-1], torch.cat([tensor, torch.zeros(1)])]
    assert before[0] not in core.digests(others)
    assert core.digests([torch.zeros(1)]) != core.digests([torch.zeros(2)])
