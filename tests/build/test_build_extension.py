"""The built extension: loaded once, cached under a name that fits this torch only."""

import dataclasses
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import time

import pytest
import torch

from fastsync._build import extension, recipe
from fastsync._build.env import Env
from fastsync._build.recipe import BuildError


def test_it_is_loaded_once():
    assert extension.load() is extension.load()
    assert sys.modules["fastsync._C"] is extension.load()
    assert not extension.load().device_problem("cpu")
    assert "no kernels for meta" in extension.load().device_problem("meta")


OLD = r"CUDA 13\.0 and need .* for CUDA 13 \(580 or newer\), but the one here serves CUDA 12\.8"
DRIVERS = [
    # CUDA's runtime and driver, and the problem
    (13000, 13000, ""),
    (13020, 13000, ""),  # within a major version any minor version runs
    (12040, 13010, ""),
    (13000, 12080, OLD),
    (13000, 12080, r"build fastsync with CUDA 12: point CUDA_HOME"),
    (12060, 11080, r"CUDA 12 \(525 or newer\)"),
    (14000, 13000, r"for CUDA 14, but"),
    (13000, 0, r"but there is none here\. Install one"),
]


@pytest.mark.parametrize(("runtime", "driver", "problem"), DRIVERS)
def test_a_driver_that_is_too_old_is_told_with_the_remedy(runtime, driver, problem):
    found = extension.load().driver_problem(runtime, driver)
    assert bool(found) == bool(problem)
    assert re.search(problem, found)


def test_a_gpu_without_kernels_is_told_with_the_remedy():
    found = extension.load().architecture_problem
    assert not found(0)
    assert re.search(r"not compiled for this GPU, .* sm_75\. Set FASTSYNC_CUDA_ARCHS=75", found(75))


@pytest.mark.skipif(not extension.load().with_cuda, reason="the extension has no CUDA kernels")
def test_the_driver_of_this_machine_is_looked_at():
    found = extension.load().device_problem("cuda")
    assert bool(found) is not torch.cuda.is_available()
    if not os.path.exists("/dev/nvidiactl"):
        assert "there is none here" in found


def test_the_cache_is_keyed_by_torch():
    folder = extension._built(Env.read()).parent
    assert folder.name.startswith("torch" + torch.__version__.split("+")[0])


def test_a_prebuilt_extension_must_be_for_this_torch(monkeypatch, tmp_path):
    monkeypatch.setattr(extension, "_PACKAGE", tmp_path)
    assert extension._prebuilt() is None
    (tmp_path / "_C.so").touch()
    assert extension._prebuilt() is None
    (tmp_path / "_prebuilt.json").write_text(json.dumps(recipe.binary_identity()))
    assert extension._prebuilt() == tmp_path / "_C.so"
    (tmp_path / "_prebuilt.json").write_text(json.dumps({"torch": "1.0", "cuda": "None"}))
    assert extension._prebuilt() is None


def test_where_it_has_come_from(monkeypatch):
    found = extension.origin()
    assert str(found.file) == extension.load().__file__
    monkeypatch.setattr(extension, "_PACKAGE", found.file.parent)
    assert extension.origin().prebuilt, "it lies in the package"
    monkeypatch.setattr(extension, "_PACKAGE", found.file.parent / "elsewhere")
    assert not extension.origin().prebuilt


def test_a_broken_library_says_what_to_do(tmp_path):
    (tmp_path / "_C.so").write_text("not a library")
    with pytest.raises(BuildError, match="Delete that file"):
        extension._import(tmp_path / "_C.so")


def fake_build(monkeypatch, tmp_path, script):
    """An Env and a compiler that is a few lines of Python."""
    source = tmp_path / "build.py"
    source.write_text(f"import pathlib, sys, time\nout = pathlib.Path(sys.argv[2])\n{script}\n")
    monkeypatch.setattr(extension, "_RECIPE", str(source))
    monkeypatch.setattr(recipe, "fingerprint", lambda *args: "digest")
    return dataclasses.replace(Env.read(), cache_dir=tmp_path / "cache", cuda="0")


def test_many_builders_build_once(monkeypatch, tmp_path):
    script = "time.sleep(0.3); (out / '_C.so').write_text(out.name)"
    env = fake_build(monkeypatch, tmp_path, script)
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(extension._built(env))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({path.read_text() for path in found}) == 1
    assert len(found) == 4
    assert not list(env.cache_dir.glob("*.building.*"))


def test_each_build_has_its_own_lock_and_log(monkeypatch, tmp_path):
    env = fake_build(monkeypatch, tmp_path, "(out / '_C.so').touch()")
    for digest in ("one", "two"):
        monkeypatch.setattr(recipe, "fingerprint", lambda *args, digest=digest: digest)
        extension._built(env)
    version = extension.torch.__version__.split("+")[0]
    assert sorted(path.name for path in env.cache_dir.iterdir()) == sorted(
        f"torch{version}-{digest}{ending}"
        for digest in ("one", "two")
        for ending in ("", ".lock", ".log")
    )


def test_a_failed_build_shows_the_log_and_leaves_nothing(monkeypatch, tmp_path):
    env = fake_build(monkeypatch, tmp_path, "sys.exit('undefined reference to nonsense')")
    with pytest.raises(BuildError, match="undefined reference to nonsense"):
        extension._built(env)
    assert not [p for p in env.cache_dir.iterdir() if p.is_dir()]
    env = fake_build(monkeypatch, tmp_path, "(out / '_C.so').touch()")
    assert extension._built(env).exists(), "the next attempt is not in the way of the last"


def test_a_cache_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    folder = extension._cache_folder(tmp_path / "file" / "cache")
    assert folder.is_dir()
    assert tmp_path not in folder.parents


@pytest.mark.slow
def test_importing_the_package_builds_nothing():
    code = "import fastsync, sys; sys.exit('fastsync._C' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_long_build_says_that_it_goes_on(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(extension, "_REPORT_SECONDS", 0.1)
    extension._built(fake_build(monkeypatch, tmp_path, "time.sleep(1); (out / '_C.so').touch()"))
    said = capsys.readouterr().err
    assert "C++ only, without CUDA" in said and "s so far" in said and "compiled in" in said


@pytest.mark.slow
def test_a_rank_that_waits_names_who_compiles(monkeypatch, tmp_path, capsys):
    begun, runs = tmp_path / "begun", tmp_path / "runs"
    script = f"pathlib.Path({str(begun)!r}).touch(); time.sleep(1); (out / '_C.so').touch()"
    script += f"; open({str(runs)!r}, 'a').write('x')"
    env = fake_build(monkeypatch, tmp_path, script)
    first = threading.Thread(target=extension._built, args=(dataclasses.replace(env, rank=3),))
    first.start()
    while not begun.exists():
        time.sleep(0.01)
    extension._built(dataclasses.replace(env, rank=2))
    first.join()
    assert runs.read_text() == "x"
    assert f"waiting for rank 3 (process {os.getpid()} on" in capsys.readouterr().err


SOMEBODY_ELSE = 54321
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


def by_mode(path):
    path.chmod(0o777)
    return "writable by others"


def by_owner(path):
    os.chown(path, SOMEBODY_ELSE, -1)
    return f"belongs to user id {SOMEBODY_ELSE}"


def by_link(path):
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")
    return "symbolic link"


TRICKS = [by_mode, pytest.param(by_owner, marks=as_root), by_link]


@pytest.fixture
def env(monkeypatch, tmp_path):
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    return fake_build(monkeypatch, tmp_path, "(out / '_C.so').touch()")


@pytest.mark.parametrize("trick", TRICKS)
@pytest.mark.parametrize("which", ["library", "folder"])
def test_a_library_that_others_may_have_written_is_refused(env, which, trick):
    library = extension._built(env)
    assert extension._why_not_ours(library) is None
    reason = trick(library if which == "library" else library.parent)
    with pytest.raises(BuildError, match=rf"refusing to load.*{reason}.*Delete"):
        extension._built(env)


@pytest.mark.parametrize("trick", TRICKS[:2])
def test_a_cache_that_others_may_write_is_not_used(env, tmp_path, trick, capsys):
    env.cache_dir.mkdir()
    reason = trick(env.cache_dir)
    fallback = tmp_path / "tmp" / f"fastsync-{os.getuid()}"
    assert extension._built(env).parent.parent == fallback
    assert stat.S_IMODE(fallback.stat().st_mode) == 0o700
    said = capsys.readouterr().err
    assert reason in said and "FASTSYNC_CACHE_DIR" in said
    trick(fallback)
    with pytest.raises(BuildError, match="FASTSYNC_CACHE_DIR"):
        extension._built(env)


@pytest.mark.skipif(shutil.which("readelf") is None, reason="there is no readelf here")
def test_the_installed_library_is_stripped_and_small():
    library = extension._built(Env.read())
    # The names of the library's own sections: the kernels in it are objects with sections, too.
    listed = subprocess.run(["readelf", "-SW", library], capture_output=True, text=True, check=True)
    assert ".dynsym" in listed.stdout
    assert ".symtab" not in listed.stdout or Env.read().sanitize
    assert library.stat().st_size < 30 << 20
