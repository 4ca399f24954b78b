"""Environment variables: defaults, values, and what is refused."""

from dataclasses import replace
from pathlib import Path

import pytest

from fastsync._build.env import Env, has_rank, inherited, set_variables


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
            "FASTSYNC_STRICT": "1",
            "FASTSYNC_VERBOSE": "1",
            "FASTSYNC_AGREE_TIMEOUT": "2.5",
            "RANK": "3",
            "FASTSYNC_SHM": "0",
            "FASTSYNC_WATCH": "0",
            "FASTSYNC_STALL_WARN": "30",
            "FASTSYNC_LOST_AFTER": "5",
            "FASTSYNC_STRAGGLER_WARN": "0.25",
            "FASTSYNC_UNIT_MEMORY_MB": "0.5",
            "FASTSYNC_ELASTIC_RANK": "2/4",
            "FASTSYNC_ELASTIC_STORE": "127.0.0.1:29400",
            "TORCHELASTIC_RESTART_COUNT": "5",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
            "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        }
    )
    expected = Env(Path("/there"), "0", ("80", "90a"), "thread", True, True, 2.5, 3)
    watching = replace(expected, shared_memory=False, watch=False, stall_warn=30.0, lost_after=5.0)
    watching = replace(watching, straggler_warn=0.25)
    placed = replace(watching, unit_memory_mb=0.5, elastic_rank=(2, 4), restarts=5)
    met = replace(placed, elastic_store=("127.0.0.1", 29400))
    assert env == replace(met, nccl_lets_live=True)
    assert not Env.read({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}).nccl_lets_live
    assert Env.read({"XDG_CACHE_HOME": "/elsewhere"}).cache_dir == Path("/elsewhere/fastsync")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("FASTSYNC_CUDA", "yes"),
        ("FASTSYNC_STRICT", "yes"),
        ("FASTSYNC_SHM", "yes"),
        ("FASTSYNC_WATCH", "yes"),
        ("FASTSYNC_STALL_WARN", "0"),
        ("FASTSYNC_LOST_AFTER", "-1"),
        ("FASTSYNC_STRAGGLER_WARN", "10"),
        ("FASTSYNC_STRAGGLER_WARN", "nan"),
        ("FASTSYNC_UNIT_MEMORY_MB", "0"),
        ("FASTSYNC_UNIT_MEMORY_MB", "much"),
        ("FASTSYNC_UNIT_MEMORY_MB", "inf"),
        ("FASTSYNC_CUDA_ARCHS", "hopper"),
        ("FASTSYNC_AGREE_TIMEOUT", "0"),
        ("FASTSYNC_AGREE_TIMEOUT", "-1"),
        ("FASTSYNC_AGREE_TIMEOUT", "soon"),
        ("FASTSYNC_AGREE_TIMEOUT", "nan"),
        ("RANK", "first"),
        ("FASTSYNC_ELASTIC_RANK", "4/0"),
        ("FASTSYNC_ELASTIC_RANK", "2"),
        ("FASTSYNC_ELASTIC_STORE", "29400"),
        ("FASTSYNC_ELASTIC_STORE", "127.0.0.1:any"),
        ("TORCHELASTIC_RESTART_COUNT", "many"),
    ],
)
def test_nonsense_is_named(name, value):
    with pytest.raises(ValueError, match=name) as caught:
        Env.read({name: value})
    assert value in str(caught.value)


def test_variables_of_ranks_are_those_of_fastsync_and_the_backends():
    given = {"NCCL_ALGO": "Ring", "FASTSYNC_SHM": "0", "HOME": "/h", "OMP_NUM_THREADS": "1"}
    given |= {"GLOO_SOCKET_IFNAME": "eth0", "MY_NCCL_KEY": "secret"}
    wanted = ["FASTSYNC_SHM", "GLOO_SOCKET_IFNAME", "NCCL_ALGO", "OMP_NUM_THREADS"]
    assert list(set_variables(given)) == wanted


def test_a_launcher_says_who_this_is_and_where_the_others_are():
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
    assert has_rank(place)
    for name in place:
        assert not has_rank({**place, name: ""}), name


def test_what_another_process_inherits():
    assert inherited({"A": "2"}, {"A": "1", "B": "3"}) == {"A": "2", "B": "3"}
