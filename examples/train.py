"""Trains the byte-level GPT with data parallelism, the way a user's script would."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

import torch
from torch import nn

from examples.common.ranks import Group
from examples.common.text import Progress
from examples.data import Corpus

BATCH = 12
PEAK_RATE = 4e-3
WARMUP_STEPS = 20
REPORTS = 10
PROGRESS_EVERY = 5


@dataclass
class History:
    """Mean loss over ranks in nats per byte, every PROGRESS_EVERY steps, and speed."""

    steps: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    tokens_per_second: float = 0.0
    seconds: float = 0.0


def learning_rate(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine down to a tenth."""
    warmup = min(1.0, (step + 1) / WARMUP_STEPS)
    return PEAK_RATE * warmup * (0.55 + 0.45 * math.cos(math.pi * step / steps))


def train(model: nn.Module, corpus: Corpus, length: int, steps: int, group: Group) -> History:
    """Trains for `steps` steps and shows progress on rank 0.

    Args:
        model: wrapped for data parallelism; called with windows [BATCH, length + 1] it gives
            the loss.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE, betas=(0.9, 0.95))
    history, progress = History(), Progress(group)
    started = time.monotonic()
    for step in range(steps):
        for options in optimizer.param_groups:
            options["lr"] = learning_rate(step, steps)
        windows = corpus.batch(group.rank, step, BATCH, length).to(group.device)
        optimizer.zero_grad()
        loss = model(windows)
        loss.backward()
        optimizer.step()
        done = step + 1
        if done % PROGRESS_EVERY == 0 or done == steps:
            history.steps.append(done)
            history.losses.append(group.mean(loss))
            history.seconds = time.monotonic() - started
            history.tokens_per_second = done * BATCH * length * group.world / history.seconds
            _report(history, steps, group, progress)
    progress.clear()
    return history


def _report(history: History, steps: int, group: Group, progress: Progress) -> None:
    """A line that stays for every tenth of the way, one that is rewritten in between."""
    done = history.steps[-1]
    eta = history.seconds / done * (steps - done)
    recent = history.losses[-max(1, len(history.losses) // REPORTS) :]
    line = (
        f"  step {done:>5}/{steps}   loss {sum(recent) / len(recent):.3f}   "
        f"{history.tokens_per_second:>9,.0f} tokens/s   ETA {eta:>4.0f} s"
    )
    stays = max(1, steps // PROGRESS_EVERY // REPORTS)
    if done == steps or len(history.steps) % stays == 0:
        progress.clear()
        if group.is_main:
            print(line, flush=True)
    else:
        progress.show(line)
