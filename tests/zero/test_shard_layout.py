"""Ownership of elements by ranks."""

import pytest

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
