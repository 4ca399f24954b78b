"""Errors that a benchmark expects and reports in one line."""


class UsageError(ValueError):
    """The command line asks for something that does not exist or cannot run here."""


class CheckFailed(RuntimeError):
    """A variant trained other weights than default DDP."""


class MissingRights(RuntimeError):
    """This user or this machine may not do what the benchmark needs."""
