"""Whole training steps over links of given rates, every way to synchronise side by side.

    python -m bench.links --links 1gbit,10gbit,loopback --ranks 2,4 --json out/links.json

Ranks live in network namespaces of their own, joined by veth pairs (and by a bridge where there are
more than two) whose rate is shaped in both directions of every rank. This needs root, `ip` and
`tc`; the exit code is 3 where something of that is missing. The namespaces are removed at the end,
on Ctrl-C and on errors too, and what a killed run has left behind is removed at the next start.
Links: a rate such as 100mbit, `veth` for such a pair without shaping, `loopback` for the loopback
device of this machine, which needs no rights.

[Note: What a link allows]
The rate of a link is measured by Gloo's all-reduce of a bare fp32 tensor, in which each of N ranks
sends 2(N-1)/N of its bytes. What a variant has to send is what the formula of its wire format says
(docs/wire.md), scales of blocks included, without padding, flags and headers; the time for that at
the measured rate is its limit, of which backward can hide a part. Synchronisation is the step less
that of `no_sync` in the same round. Bytes are counted by the interface, headers and
acknowledgements included.

On links below 500 Mbit/s the model has an eighth of its size by default.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench import cli, jobs, netns
from bench.harness import Settings
from bench.launch import Group
from bench.link_steps import LinkRun, measure_link
from bench.machine import command_line, describe, environment
from bench.netns import parse_links
from bench.record import write_json
from bench.tables import links_table
from bench.wrappers import BASELINE, FLOOR, VARIANTS, select

KIND = "links"
SCHEMA = 1
DEFAULTS = Settings(rounds=9, steps=1, warmup=1, check_steps=2, seconds=45.0)


def run(args: argparse.Namespace, group: Group, report: jobs.Report) -> int:
    """What each rank does: measures those of the links that its place allows, one by one."""
    link = netns.Link.here(group.world)
    names = [n for n in parse_links(args.links) if n.on_links == (link.seat is not None)]
    selection = select(args.wrappers, required=(FLOOR, args.baseline))
    work = LinkRun(args.model, args.wait, selection.variants, _settings(args), link)
    facts = environment(group)
    if group.is_main:
        print(describe(facts), flush=True)
        for name, reason in selection.skipped.items():
            print(f"skipped {name}: {reason}")
    records = []
    # By size of the model, so that each is built and checked once; the unshaped links first.
    for wanted in sorted(names, key=lambda n: (-n.scale, n.rate is not None)):
        scale = wanted.scale if args.scale is None else args.scale
        record = measure_link(work, wanted.name, wanted.rate, scale, group)
        records.append(record)
        if group.is_main:
            print(f"\n{title(record)}\n{links_table(record, args.markdown)}", flush=True)
            report({"environment": facts, "links": records})
    return 0


def title(record: dict[str, Any]) -> str:
    """What was measured, in a line."""
    rate = record["rate_bytes_per_second"] * 8e-9
    return (
        f"{record['link']}, {record['ranks']} ranks, {record['model']}: "
        f"{record['gradient_bytes'] / 1e6:.1f} MB of gradients; all-reduce {rate:.3f} Gbit/s"
    )


def _settings(args: argparse.Namespace) -> Settings:
    return Settings(
        args.rounds, args.steps, args.warmup, args.check_steps, args.baseline, None, args.seconds
    )


def _start(args: argparse.Namespace) -> int:
    links, worlds = parse_links(args.links), jobs.worlds(args.ranks, least=2)
    select(args.wrappers, required=(FLOOR, args.baseline))  # an unknown name fails here
    kinds = [k for k in (True, False) if any(link.on_links == k for link in links)]
    todo = [jobs.Job(world, on_links) for world in worlds for on_links in kinds]
    return jobs.run_jobs(
        lambda group, report: run(args, group, report),
        todo,
        args.threads,
        lambda parts: _write(parts, args),
    )


def _write(parts: list[jobs.Part], args: argparse.Namespace) -> None:
    if args.json is None:
        return
    result = {
        "kind": KIND,
        "schema": SCHEMA,
        "command": command_line(),
        "environment": parts[0]["environment"],
        "settings": asdict(_settings(args)),
        "links": [record for part in parts for record in part["links"]],
    }
    write_json(result, args.json)


def command() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.links",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--links", default="1gbit,10gbit,veth,loopback", help="default: %(default)s")
    add("--ranks", default="2", help="numbers of ranks, such as 2,4 (default: 2)")
    add("--model", default="wide", help="see bench.step --models (default: wide)")
    add("--scale", type=float, help="share of the model's parameters (default: by the link)")
    add("--wait", type=float, help="seconds of backward of 'waiting' and 'paced'")
    add("--wrappers", default="all", help=f"all, or of {', '.join(VARIANTS)} (default: all)")
    add("--seconds", type=float, default=DEFAULTS.seconds, help="per link, about (default: 45)")
    add("--rounds", type=int, default=DEFAULTS.rounds, help="at most (default: %(default)s)")
    add("--steps", type=int, default=DEFAULTS.steps, help="timed steps in a burst (default: 1)")
    add("--warmup", type=int, default=DEFAULTS.warmup, help="steps before the first round")
    add("--check-steps", type=int, default=DEFAULTS.check_steps, help="0: no correctness check")
    add("--baseline", default=BASELINE, choices=tuple(VARIANTS), help="what ratios refer to")
    add("--threads", type=int, default=1, help="torch CPU threads per rank (default: 1)")
    add("--markdown", action="store_true", help="print tables as Markdown")
    add("--json", type=Path, help="write the result to this file")
    return parser


def main() -> int:
    args = command().parse_args()
    return cli.guarded(lambda: _start(args))


if __name__ == "__main__":
    raise SystemExit(main())
