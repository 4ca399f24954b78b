"""A rank that dies within a record of a store that is a file: torch's waits there would not end."""

import subprocess
import sys
import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from fastsync.ranks.stores import file_store
from fastsync.torch_private import PrefixStore
from tests.store_file_script import PIECES, tear

SCRIPT = "tests/store_file_script.py"
LONGEST = 60.0  # seconds, after which a wait counts as one that does not end


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "store")


@pytest.fixture
def store(path):
    dist.FileStore(path, -1).set("begun", "")  # as init_process_group makes the file
    return file_store(path, timedelta(seconds=20))


def test_it_does_what_a_store_of_torch_does(store):
    store.set("text", "some")
    assert store.get("text") == b"some"
    assert [store.add("count", n) for n in (5, 0, -2)] == [5, 5, 3]
    assert store.compare_set("new", "", "first") == b"first"
    assert store.compare_set("new", "", "second") == b"first"
    assert store.compare_set("new", "first", "third") == b"third"
    assert store.compare_set("other", "first", "third") == b"first"
    assert store.check(["text", "count"]) and not store.check(["text", "other"])
    assert store.delete_key("text") and not store.check(["text"])
    with pytest.raises(dist.DistStoreError, match="nobody has written other, or another of 1 keys"):
        store.wait(["other"], timedelta(milliseconds=30))
    threading.Timer(0.05, store.set, ("other", "late")).start()
    assert store.get("other") == b"late"
    inner = PrefixStore("inner", store)
    inner.set("text", "hidden")
    assert inner.get("text") == b"hidden" and not store.check(["text"])
    assert store.clone().get("new") == b"third"


def test_stores_of_torch_see_it_and_are_seen(store, path):
    theirs = dist.FileStore(path, -1)
    theirs.set("a", "1")
    assert store.add("a", 1) == 2 and theirs.get("a") == b"2"
    theirs.delete_key("a")
    assert not store.check(["a"])
    store.set("b", "3")
    store.delete_key("b")
    assert not theirs.check(["b"])


@pytest.mark.parametrize("pieces", range(1, len(PIECES)))
def test_half_a_record_is_none(store, path, pieces):
    store.set("count", "5")
    tear(path, pieces)
    assert store.check(["count"]) and not store.check(["other"])
    assert store.get("count") == b"5"
    assert store.compare_set("count", "4", "7") == b"5"
    store.set("more", "8")
    assert store.add("count", 1) == 6
    theirs = dist.FileStore(path, -1)  # reads all of it
    assert theirs.get("more") == b"8" and theirs.get("count") == b"6"


def test_a_file_that_has_gone_is_an_error_of_the_store(tmp_path):
    store = file_store(str(tmp_path / "none"), timedelta(seconds=1))
    for ask in (lambda: store.check(["a"]), lambda: store.add("a", 1)):
        with pytest.raises(dist.DistStoreError, match=r"cannot open .*none: No such file"):
            ask()


@pytest.mark.parametrize("death", ["wrap", "checkpoint"])
@pytest.mark.parametrize("pieces", range(1, len(PIECES)))
def test_the_others_name_who_died_within_a_record(death, pieces, path):
    world = 3
    ranks = [
        subprocess.Popen(
            [sys.executable, SCRIPT, str(rank), str(world), path, str(pieces), death],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        said = [rank.communicate(timeout=LONGEST)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for text in said[:-1]:
        assert f"SyncFault of [{world - 1}]" in text, text
    assert [rank.returncode for rank in ranks] == [0, 0, -9]
