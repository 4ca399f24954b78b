"""Offsets, padding and flags of a flat buffer."""

import random

import pytest

from fastsync.reducer.bucket_layout import ALIGNMENT, FlatLayout, align_up, flat_layout


def test_align_up():
    assert [align_up(n, 16) for n in (0, 1, 15, 16, 17)] == [0, 16, 16, 16, 32]


def test_an_example():
    layout = flat_layout([3, 16, 0, 17], 2, flags=True)
    assert layout.offsets == (0, 16, 32, 32)
    assert layout.flags_offset == 64
    assert layout.numel == 80
    assert flat_layout([3, 16, 0, 17], 2, flags=False) == FlatLayout(
        (0, 16, 32, 32), (3, 16, 0, 17), -1, 64
    )


@pytest.mark.parametrize("seed", range(20))
def test_invariants(seed):
    rng = random.Random(seed)
    numels = [rng.choice((0, 1, 7, 16, 33, 1000)) for _ in range(rng.randint(1, 40))]
    world, flags = rng.choice((1, 2, 3, 5, 8, 48)), rng.random() < 0.5
    layout = flat_layout(numels, world, flags)
    taken = set()
    for offset, numel in zip(layout.offsets, layout.numels, strict=True):
        assert offset % ALIGNMENT == 0
        run = set(range(offset, offset + numel))
        assert not run & taken
        taken |= run
    if flags:
        run = set(range(layout.flags_offset, layout.flags_offset + len(numels) + 1))
        assert not run & taken
        taken |= run
    assert layout.numel > max(taken, default=-1)
    assert layout.numel >= 1
    assert layout.numel % world == layout.numel % ALIGNMENT == 0


@pytest.mark.parametrize(
    ("offsets", "numels", "flags", "numel"),
    [
        ((0, 16), (20, 1), -1, 32),  # overlap
        ((0, 15), (1, 1), -1, 32),  # misaligned
        ((0,), (-1,), -1, 32),  # negative
        ((0,), (17,), 16, 32),  # flags inside the slot
        ((0,), (16,), -1, 15),  # too small
        ((0,), (16,), 16, 17),  # no room for the flags
    ],
)
def test_broken_layouts_are_refused(offsets, numels, flags, numel):
    with pytest.raises(ValueError, match=r"slot|flags|hold"):
        FlatLayout(offsets, numels, flags, numel)
