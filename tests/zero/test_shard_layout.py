"""Ownership of elements by ranks."""

import itertools
import math
import random

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from fastsync.zero.dcp_chunks import Chunks, rectangles
from fastsync.zero.partition import Partition, cut_by_elements, cut_by_tensors

NUMELS = [[], [0], [1], [0, 5, 0], [17, 300, 1, 64], [16] * 7, [1000, 3], [5, 5, 5, 999, 5]]


@pytest.mark.parametrize("cut", [cut_by_elements, cut_by_tensors])
@pytest.mark.parametrize("world", [1, 2, 3, 8])
@pytest.mark.parametrize("numels", NUMELS)
def test_every_element_has_one_owner_and_one_place(cut, world, numels):
    layout = cut(numels, world)
    places = set()
    for piece in layout.pieces:
        begin = layout.offsets[piece.param] + piece.begin
        end = layout.offsets[piece.param] + piece.end
        region = range(piece.rank * layout.region, (piece.rank + 1) * layout.region)
        assert begin == end or (begin in region and end - 1 in region)
        places.update(range(begin, end))
    assert len(places) == sum(numels)
    for index, numel in enumerate(numels):
        pieces = [piece for piece in layout.pieces if piece.param == index]
        assert sum(piece.end - piece.begin for piece in pieces) == numel
        assert cut is cut_by_elements or len(pieces) <= 1


def test_a_share_has_two_holders_where_ranks_may_die():
    cuts = [Partition((0, 2, 3), mine, doubled=True) for mine in range(3)]
    assert [cut.kept for cut in cuts] == [(0, 2), (1, 0), (2, 1)]
    present = (0, 3)  # rank 2 has died: the next rank offers its share
    assert [cuts[mine].offered(present) for mine in (0, 2)] == [(0,), (2, 1)]
    assert cuts[0].lost(present) == []
    assert cuts[0].lost((0,)) == [(2, 3)]


# --- Consecutive elements as rectangles, and tensors of which a rank has a part


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
