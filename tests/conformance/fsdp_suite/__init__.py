"""torch's own FSDP2 tests, run against `fastsync.fully_shard`.

The tests are not in the wheel. `python -m tests.conformance.fsdp_suite UPSTREAM` (or
`make fsdp-suite UPSTREAM=folder`) takes them from a folder with files of torch's repository
(`test/distributed/_composable/fsdp/test_fully_shard_*.py`, of the version that is installed, as
far as possible), rewrites them while importing (see `rewrite` and `stand_ins`), and runs each on
forked ranks over Gloo: two, or as many as it asks for, at most four. Nothing of the files is kept.

Every test that torch's own `fully_shard` passes that way (`baseline.json`, written by `--wrapper
torch --write-baseline`) must pass, except those in `exceptions.txt`. Names of internals that have a
counterpart in fastsync are that counterpart (`peek`). `cases.json` names, for each
test of torch's, the tests of this project that check the same behaviour.

The wrapper `broken-...` is wrong on purpose; the same command must fail with it.
"""
