"""Consecutive elements as rectangles, and tensors of which a rank has a part."""

import itertools
import math
import random

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from fastsync.zero.dcp_chunks import Chunks
from fastsync.zero.rectangles import rectangles


def elements(array, rectangle):
    offsets, sizes = rectangle
    return array[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))].ravel()


def check(shape, begin, end):
    array = np.arange(math.prod(shape)).reshape(shape)
    found = list(rectangles(shape, begin, end))
    parts = [elements(array, rectangle) for rectangle in found]
    assert all(part.size for part in parts)
    wanted = np.arange(begin, max(begin, end))
    assert np.array_equal(np.concatenate([wanted[:0], *parts]), wanted), (shape, begin, end)
    assert len(found) <= max(1, 2 * len(shape) - 1)


@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (7,), (3, 4), (2, 1, 3), (2, 3, 1, 2)])
def test_every_run_of_a_small_array(shape):
    for begin, end in itertools.product(range(math.prod(shape) + 1), repeat=2):
        check(shape, begin, end)


def test_random_runs_of_random_arrays():
    draw = random.Random(1)
    for _ in range(2000):
        shape = [draw.randint(1, 6) for _ in range(draw.randint(0, 5))]
        numel = math.prod(shape)
        check(shape, draw.randint(0, numel), draw.randint(0, numel))


def test_whole_rows_are_one_rectangle():
    assert list(rectangles((5, 4, 3), 12, 48)) == [((1, 0, 0), (3, 4, 3))]
    assert len(list(rectangles((5, 4, 3), 1, 59))) == 5


def dense(draw):
    """A tensor whose elements fill their memory, in a random order of its dimensions."""
    shape = [draw.randint(1, 4) for _ in range(draw.randint(0, 4))]
    order = draw.sample(range(len(shape)), len(shape))
    flat = torch.arange(math.prod(shape), dtype=torch.float64)
    return flat.view(shape).permute(order), flat


def test_parts_of_a_tensor_make_up_the_whole_in_any_memory_format():
    draw = random.Random(2)
    for _ in range(300):
        like, flat = dense(draw)
        cuts = sorted(draw.randint(0, flat.numel()) for _ in range(2))
        parts = [flat[a:b].clone() for a, b in itertools.pairwise([0, *cuts, flat.numel()])]
        begins = [0, *cuts]
        whole = torch.full(like.shape, -1.0, dtype=torch.float64)
        for begin, part in zip(begins, parts, strict=True):
            chunks = Chunks(like, part, begin)
            assert chunks.shape == like.shape and chunks.dtype is torch.float64
            for place in chunks.__create_chunk_list__():
                index = tuple(
                    slice(o, o + s) for o, s in zip(place.offsets, place.sizes, strict=True)
                )
                shard = chunks.__get_tensor_shard__(MetadataIndex("x", place.offsets))
                assert (whole[index] == -1).all(), "two rectangles overlap"
                whole[index] = shard
                shard.add_(1)  # as loading does
        assert torch.equal(whole, like)
        assert torch.equal(torch.cat(parts), flat + 1)


def test_what_needs_the_whole_is_refused():
    chunks = Chunks(torch.ones(4, 3), torch.ones(5), 2)
    with pytest.raises(RuntimeError, match=r"the whole is in optimizer.state_dict\(\)"):
        chunks.sum()
    assert repr(chunks).startswith("Chunks(shape=(4, 3), elements 2 to 7: tensor([1.,")
    assert torch.equal(chunks.clone().part, chunks.part)
