"""Shows a recorded timeline: a summary, an HTML page, a trace for Perfetto.

model = fastsync.FastDDP(model, timeline="run.json")    # in the training script
model.record_timeline("run.json")                       # or after fastsync.fully_shard(model)
python -m fastsync.timeline run.json                    # summary, and run.html
python -m fastsync.timeline run.json --perfetto trace.json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from fastsync.timeline.data import load
from fastsync.timeline.page import html_page
from fastsync.timeline.views import perfetto_trace, summary_text

_USAGE = 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fastsync.timeline",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("run", type=Path, help="what was recorded and written")
    add("--html", type=Path, help="where the page goes (default: beside the run, as .html)")
    add("--perfetto", type=Path, help="write a trace for ui.perfetto.dev or chrome://tracing")
    return parser


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    print(f"wrote {path}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    args = _parser().parse_args(arguments)
    try:
        run = load(args.run)
        print(summary_text(run) + "\n")
        if args.perfetto:
            _write(args.perfetto, json.dumps(perfetto_trace(run)) + "\n")
        _write(args.html or args.run.with_suffix(".html"), html_page(run))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return _USAGE
    return 0
