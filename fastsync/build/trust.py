"""Whether a file may be loaded as code: nobody else can have written or exchanged it.

[Note: whom a path is trusted to]
The library, its folder and the cache folder must be ours alone. The folders above may also be
root's: whoever may write to one of them may put another in the place of all that lies below, unless
its sticky bit is set, as the temporary folder's is. A path that passes is out of the reach of
others, so nothing can change between the check and the use.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
from pathlib import Path

__all__ = ["make_private", "why_exchangeable", "why_not_ours"]

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_MOST_LINKS = 40


def why_not_ours(path: Path) -> str | None:
    """The reason why others may write to `path` or exchange it; None where they cannot.

    The file or folder itself must be owned by this user, writable by nobody else and no symbolic
    link.
    """
    path = Path(os.path.abspath(path))
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        return f"{path} is a symbolic link"
    if status.st_uid != os.geteuid():
        return f"{path} belongs to {_user(status.st_uid)}"
    if status.st_mode & _OTHERS_WRITE:
        return f"{path} is writable by others (mode {stat.S_IMODE(status.st_mode):o})"
    return why_exchangeable(path.parent)


def make_private(folder: Path) -> None:
    """Creates a folder that only this user can enter; one that is there stays as it is."""
    folder.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
    folder.mkdir(mode=0o700, exist_ok=True)


def why_exchangeable(folder: Path, links: int = _MOST_LINKS) -> str | None:
    """The reason why others may replace what lies in a folder, or the folder itself.

    Symbolic links are followed, at most `links` of them one after the other.
    """
    path = Path(os.path.abspath(folder))
    for level in (*reversed(path.parents), path):
        status = level.lstat()
        if status.st_uid not in (0, os.geteuid(), Path("/").lstat().st_uid):
            return f"{level} belongs to {_user(status.st_uid)}"
        if stat.S_ISLNK(status.st_mode):
            if links == 0:
                return f"{level} is a loop of symbolic links"
            target = level.parent.resolve() / level.readlink()
            if reason := why_exchangeable(target, links - 1):
                return reason
        elif _others_may_write(status):
            return f"{level} is writable by others (mode {stat.S_IMODE(status.st_mode):o})"
    return None


def _others_may_write(status: os.stat_result) -> bool:
    if status.st_mode & stat.S_ISVTX:
        return False
    if status.st_mode & stat.S_IWOTH:
        return True
    return bool(status.st_mode & stat.S_IWGRP) and not _is_private(status.st_gid)


def _is_private(group: int) -> bool:
    """Whether a group is this user's own, as many systems make one for each user."""
    try:
        user, entry = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    named_alike = user.pw_gid == group and entry.gr_name == user.pw_name
    return named_alike and set(entry.gr_mem) <= {user.pw_name}


def _user(uid: int) -> str:
    try:
        return f"user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"user id {uid}"
