"""Code is loaded only from where nobody else can have put it."""

import dataclasses
import os
import stat
import tempfile

import pytest

from fastsync.build import extension, recipe
from fastsync.build.env import Env
from fastsync.build.recipe import BuildError
from fastsync.build.trust import make_private, why_exchangeable, why_not_ours

SOMEBODY_ELSE = 54321
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


def make_folder(path, mode=0o700):
    path.mkdir()
    path.chmod(mode)
    return path


def test_what_is_ours_is_trusted(tmp_path):
    folder = make_folder(tmp_path / "ours", 0o755)
    (folder / "file").touch(mode=0o644)
    assert why_not_ours(folder) is None
    assert why_not_ours(folder / "file") is None


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o777, 0o1777])
def test_what_others_may_write_is_not(tmp_path, mode):
    folder = make_folder(tmp_path / "open", mode)
    assert "writable by others" in why_not_ours(folder)


@as_root
def test_what_others_own_is_not(tmp_path):
    folder = make_folder(tmp_path / "theirs")
    os.chown(folder, SOMEBODY_ELSE, -1)
    assert f"belongs to user id {SOMEBODY_ELSE}" in why_not_ours(folder)
    below = make_folder(folder / "ours")
    assert f"{folder} belongs to" in why_not_ours(below)


def test_a_link_is_not(tmp_path):
    target = make_folder(tmp_path / "target")
    (tmp_path / "link").symlink_to(target)
    assert "symbolic link" in why_not_ours(tmp_path / "link")


def test_a_folder_above_that_others_may_write(tmp_path):
    above = make_folder(tmp_path / "above", 0o777)
    folder = make_folder(above / "ours")
    assert f"{above} is writable by others" in why_not_ours(folder)
    above.chmod(0o1777)
    assert why_not_ours(folder) is None, "nobody else renames what lies in a sticky folder"


def test_a_link_on_the_way_leads_into_what_others_may_write(tmp_path):
    above = make_folder(tmp_path / "open", 0o777)
    make_folder(above / "inside")
    (tmp_path / "link").symlink_to("open/inside")
    assert f"{above} is writable by others" in why_exchangeable(tmp_path / "link")
    (tmp_path / "round").symlink_to("round")
    with pytest.raises((OSError, RuntimeError)):
        why_not_ours((tmp_path / "round" / "file").resolve(strict=True))


def test_a_new_folder_is_private(tmp_path):
    before = os.umask(0)
    try:
        make_private(tmp_path / "new")
        make_private(tmp_path / "new")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700


@pytest.fixture
def env(monkeypatch, tmp_path):
    """A cache folder, a temporary folder and a compiler that is a few lines of Python."""
    source = tmp_path / "build.py"
    source.write_text(
        "import pathlib, sys\n(pathlib.Path(sys.argv[2]) / '_C.so').write_text('built')\n"
    )
    monkeypatch.setattr(extension, "_RECIPE", str(source))
    monkeypatch.setattr(recipe, "fingerprint", lambda *args: "digest")
    temporary = make_folder(tmp_path / "tmp", 0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    return dataclasses.replace(Env.read(), cache_dir=tmp_path / "cache", cuda="0")


def fallback():
    return extension.Path(tempfile.gettempdir()) / f"fastsync-{os.getuid()}"


def plant(cache):
    """A library of the right name, as another user would put it there."""
    version = extension.torch.__version__.split("+")[0]
    folder = cache / f"torch{version}-digest"
    folder.mkdir(mode=0o755)
    (folder / "_C.so").write_text("planted")
    return folder / "_C.so"


def test_a_library_that_is_built_is_ours_alone(env):
    before = os.umask(0)
    try:
        library = extension._built(env)
    finally:
        os.umask(before)
    assert why_not_ours(library) is None
    assert extension._built(env).read_text() == "built"


def test_a_cache_that_others_may_write_is_not_used(env, capsys):
    library = plant(make_folder(env.cache_dir))
    env.cache_dir.chmod(0o777)
    found = extension._built(env)
    assert found.read_text() == "built"
    assert found.parent.parent == fallback()
    assert library.read_text() == "planted"
    said = capsys.readouterr().err
    assert f"{env.cache_dir} is writable by others" in said
    assert "chmod go-w" in said and "FASTSYNC_CACHE_DIR" in said


@as_root
def test_a_cache_of_somebody_else_is_not_used(env, capsys):
    plant(make_folder(env.cache_dir))
    os.chown(env.cache_dir, SOMEBODY_ELSE, -1)
    assert extension._built(env).read_text() == "built"
    assert f"belongs to user id {SOMEBODY_ELSE}" in capsys.readouterr().err


def test_a_cache_may_be_a_link_of_ours(env, tmp_path):
    make_folder(tmp_path / "scratch")
    env.cache_dir.symlink_to("scratch")
    assert extension._built(env).parent.parent == tmp_path / "scratch"


def without_cache(env):
    """The cache folder cannot be made: a file lies in its way."""
    env.cache_dir.touch()
    return dataclasses.replace(env, cache_dir=env.cache_dir / "below")


def test_the_fallback_is_private(env):
    extension._built(without_cache(env))
    assert stat.S_IMODE(fallback().stat().st_mode) == 0o700


def planted_by_mode(folder):
    folder.chmod(0o777)


def planted_by_owner(folder):
    os.chown(folder, SOMEBODY_ELSE, -1)


def planted_by_link(folder):
    folder.rename(folder.with_name("elsewhere"))
    folder.symlink_to("elsewhere")


@pytest.mark.parametrize(
    "trick", [planted_by_mode, pytest.param(planted_by_owner, marks=as_root), planted_by_link]
)
def test_a_fallback_that_somebody_planted_is_refused(env, trick):
    plant(make_folder(fallback()))
    trick(fallback())
    with pytest.raises(BuildError, match="FASTSYNC_CACHE_DIR") as caught:
        extension._built(without_cache(env))
    assert str(fallback()) in str(caught.value)


@pytest.mark.parametrize("which", ["library", "folder"])
def test_a_library_that_others_may_write_is_refused(env, which):
    library = plant(make_folder(env.cache_dir))
    (library if which == "library" else library.parent).chmod(0o777)
    with pytest.raises(BuildError, match=r"refusing to load.*others.*Delete"):
        extension._built(env)
