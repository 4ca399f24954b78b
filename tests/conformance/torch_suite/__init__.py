"""torch's own DDP tests, run against FastDDP.

`python -m tests.conformance.torch_suite --wrapper fastddp` (or `make torch-suite`) takes the tests
that build a DistributedDataParallel from the installed torch, rewrites them (see `rewrite`), and
runs each on two forked ranks. Every test that torch's own class passes that way (`baseline.json`,
written by `--wrapper ddp --write-baseline`) must pass, except those in `exceptions.txt`.

The tests are written for DDP's defaults, some for the errors that those make. The class under test
is therefore `SuiteDDP`: FastDDP with DDP's defaults for `find_unused_parameters` and
`gradient_as_bucket_view`, passed as a user would pass them. Nothing else differs.

The wrappers `broken-...` are wrong on purpose; the same command must fail with each of them.
"""
