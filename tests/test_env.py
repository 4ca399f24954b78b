"""Environment variables: defaults, values, and what is refused."""

from dataclasses import replace
from pathlib import Path

import pytest

from fastsync.build.env import Env


def test_defaults():
    env = Env.read({})
    assert env == Env(cache_dir=Path.home() / ".cache" / "fastsync")
    assert (env.cuda, env.rank, env.verbose, env.agree_timeout) == ("auto", 0, False, 60.0)


def test_every_variable():
    env = Env.read(
        {
            "FASTSYNC_CACHE_DIR": "/there",
            "XDG_CACHE_HOME": "/elsewhere",
            "FASTSYNC_CUDA": "0",
            "FASTSYNC_CUDA_ARCHS": "8.0, 9.0a".replace(" ", ""),
            "FASTSYNC_SANITIZE": "thread",
            "FASTSYNC_VERBOSE": "1",
            "FASTSYNC_AGREE_TIMEOUT": "2.5",
            "RANK": "3",
            "FASTSYNC_SHM": "0",
            "FASTSYNC_WATCH": "0",
            "FASTSYNC_STALL_WARN": "30",
        }
    )
    expected = Env(Path("/there"), "0", ("80", "90a"), "thread", True, 2.5, 3, shared_memory=False)
    assert env == replace(expected, watch=False, stall_warn=30.0)
    assert Env.read({"XDG_CACHE_HOME": "/elsewhere"}).cache_dir == Path("/elsewhere/fastsync")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("FASTSYNC_CUDA", "yes"),
        ("FASTSYNC_SHM", "yes"),
        ("FASTSYNC_WATCH", "yes"),
        ("FASTSYNC_STALL_WARN", "0"),
        ("FASTSYNC_CUDA_ARCHS", "hopper"),
        ("FASTSYNC_AGREE_TIMEOUT", "0"),
        ("FASTSYNC_AGREE_TIMEOUT", "-1"),
        ("FASTSYNC_AGREE_TIMEOUT", "soon"),
        ("FASTSYNC_AGREE_TIMEOUT", "nan"),
        ("RANK", "first"),
    ],
)
def test_nonsense_is_named(name, value):
    with pytest.raises(ValueError, match=name) as caught:
        Env.read({name: value})
    assert value in str(caught.value)
