"""Makes the picture of docs/tuning.md from a real run: python docs/make_timeline.py

Two ranks train a small transformer and record themselves; rank 1 gets batches half as large again,
so that there is a straggler. The page is then photographed by Chromium, through the package
playwright. Writes docs/timeline.png; the recording and the page go to out/.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

import torch
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.models import WORKLOADS  # noqa: E402
from examples.common.ranks import Group, launch  # noqa: E402
from fastsync import FastDDP, TimelinePolicy, timeline  # noqa: E402

RUN, PAGE = ROOT / "out" / "timeline.json", ROOT / "out" / "timeline.html"
STEPS, SKIP = 12, 4
BROWSERS = ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome")


def train(group: Group) -> int:
    """One rank: enough steps to fill the window, and one more forward that writes it."""
    workload = WORKLOADS["transformer"]()
    policy = TimelinePolicy(str(RUN), skip=SKIP, steps=STEPS)
    model: nn.Module = FastDDP(workload.build(), bucket_cap_mb=8, timeline=policy)
    for step in range(SKIP + STEPS + 1):
        batch = workload.batch(group.rank, step)
        if group.rank == 1:
            batch = torch.cat([batch, batch[: len(batch) // 2]])
        model.zero_grad()
        workload.loss(model(batch)).backward()
    return 0


def photograph(target: Path) -> None:
    """Takes the picture of the page, with a bucket's parameters shown."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        found = next(filter(None, map(shutil.which, BROWSERS)), None)
        browser = play.chromium.launch(executable_path=found, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1240, "height": 800}, device_scale_factor=1.5)
        page.goto(PAGE.as_uri())
        page.locator('.rank[data-rank="1"] .bucket').nth(0).hover()
        page.screenshot(path=target, full_page=True)
        browser.close()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "timeline.png")
    args = parser.parse_args()
    code = launch(train, 2)
    if code == 0 and "RANK" not in os.environ:
        timeline.main([str(RUN), "--html", str(PAGE)])
        photograph(args.out)
        print(f"wrote {args.out}")
    return code


if __name__ == "__main__":
    raise SystemExit(main())
