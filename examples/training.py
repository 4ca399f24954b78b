"""A complete data-parallel training script, from torchrun to a checkpoint that resumes bit for bit.

    torchrun --nproc-per-node=2 -m examples.training --checkpoint out/training.pt

on two machines, the same on both but for the node's rank:

    torchrun --nnodes=2 --node-rank=0 --master-addr=HOST --master-port=29500 --nproc-per-node=1 \\
        -m examples.training

Classifies noisy pictures of four shapes. What a script like this needs:

  * a DistributedSampler, told the epoch, so that ranks see different samples in a new order;
  * one seed for the weights and another one per rank for dropout and augmentation;
  * a learning rate that grows with the global batch, after a warm-up;
  * SyncBatchNorm where the ranks have GPUs;
  * gradient accumulation under no_sync(): gradients travel once per step;
  * mixed precision: autocast, and a GradScaler for fp16;
  * checkpoints by rank 0, and --resume. An interrupted run continues with the bits that it would
    have had on two ranks; with more, up to the order of sums, which depends on the buckets.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, fields
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, Sampler, Subset
from torch.utils.data.distributed import DistributedSampler

import fastsync
from examples import checkpoint
from examples.shapes import CLASSES, SIDE, shapes

REFERENCE_BATCH = 64  # the global batch that `rate` is meant for
VALIDATION = 512
PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def _option(default: Any, meaning: str) -> Any:
    return field(default=default, metadata={"help": meaning})


@dataclass(frozen=True)
class Settings:
    """The settings that decide the result of a run; a checkpoint stores them."""

    epochs: int = _option(4, "passes over the data")
    samples: int = _option(4096, "training pictures in all")
    batch: int = _option(32, "pictures per rank in one forward")
    accumulate: int = _option(2, "forwards and backwards per step")
    rate: float = _option(0.01, f"learning rate for a global batch of {REFERENCE_BATCH}")
    warmup: float = _option(1.0, "epochs until the learning rate has reached its peak")
    seed: int = _option(0, "of weights, data and, with the rank, dropout and augmentation")
    precision: str = _option("fp32", "of the forward")
    wire: str = _option("fp32", "what FastDDP sends gradients as")
    wrapper: str = _option("fastsync", "FastDDP, or torch's DDP")
    threads: int = _option(1, "of the CPU per rank; they decide the order of sums in its kernels")

    @property
    def steps_per_epoch(self) -> int:
        """Return the steps of a rank; samples beyond them are left to another epoch's order."""
        return self.samples // dist.get_world_size() // (self.batch * self.accumulate)

    def check(self) -> None:
        """Raise ValueError where an epoch has no step."""
        if self.steps_per_epoch < 1:
            raise ValueError(
                f"{self.samples} samples do not fill one step of {dist.get_world_size()} ranks x "
                f"{self.accumulate} x {self.batch}; give more samples or smaller batches"
            )


@dataclass(frozen=True)
class Saving:
    """The file for checkpoints, their interval in steps, and whether to continue from one."""

    path: Path | None = None
    every: int = 0
    resume: bool = False


@dataclass(frozen=True)
class Result:
    """The result of a run, the same on every rank: `digest` is the SHA-256 of all weights and
    buffers, `rates` the learning rate of every step that this run made."""

    loss: float
    accuracy: float
    digest: str
    rates: tuple[float, ...]


class ResumableSampler(DistributedSampler[Any]):
    """A DistributedSampler that can start in the middle of an epoch."""

    skip = 0

    def start(self, epoch: int, skip: int) -> None:
        """The order of `epoch`, without this rank's first `skip` samples."""
        self.set_epoch(epoch)
        self.skip = skip

    def __iter__(self) -> Iterator[Any]:
        return islice(super().__iter__(), self.skip, None)


def build_model() -> nn.Module:
    def block(channels_in: int, channels: int) -> list[nn.Module]:
        convolution = nn.Conv2d(channels_in, channels, 3, padding=1, bias=False)
        return [convolution, nn.BatchNorm2d(channels), nn.ReLU(), nn.MaxPool2d(2)]

    features = 32 * (SIDE // 4) ** 2
    head = [nn.Flatten(), nn.Dropout(0.2), nn.Linear(features, len(CLASSES))]
    return nn.Sequential(*block(1, 16), *block(16, 32), *head)


def wrap(module: nn.Module, settings: Settings, device: torch.device) -> DistributedDataParallel:
    """Wrap the model: the only difference between torch's DDP and fastsync."""
    device_ids = [device.index] if device.type == "cuda" else None
    if settings.wrapper == "torch":
        return DistributedDataParallel(module, device_ids=device_ids)
    return fastsync.FastDDP(module, device_ids=device_ids, wire=settings.wire)


def learning_rate(step: int, settings: Settings) -> float:
    """Linear scaling with gradual warm-up, then a cosine to zero.

    N times the batch takes N times the rate, reached from the unscaled rate in small steps:
    P. Goyal et al., "Accurate, large minibatch SGD" (2017).
    """
    world, per_epoch = dist.get_world_size(), settings.steps_per_epoch
    peak = settings.rate * settings.batch * settings.accumulate * world / REFERENCE_BATCH
    total, warmup = settings.epochs * per_epoch, settings.warmup * per_epoch
    if step < warmup:
        return settings.rate + (peak - settings.rate) * (step + 1) / warmup
    progress = (step - warmup) / max(1.0, total - warmup)
    return peak * 0.5 * (1 + math.cos(math.pi * progress))


def augment(pictures: Tensor) -> Tensor:
    """Flips some pictures and changes their brightness, by this rank's random numbers."""
    flipped = torch.where(torch.rand(len(pictures), 1, 1, 1) < 0.5, pictures.flip(3), pictures)
    return flipped + 0.1 * torch.randn(len(pictures), 1, 1, 1)


class Trainer:
    """One rank's training: model, optimizer, scaler, data and how many steps are done."""

    def __init__(self, settings: Settings, device: torch.device) -> None:
        settings.check()
        torch.set_num_threads(settings.threads)  # torchrun sets it for several ranks per node only
        self.settings, self.device, self.steps = settings, device, 0
        torch.manual_seed(settings.seed)  # the same weights on every rank
        module = build_model()
        if device.type == "cuda":  # there is no SyncBatchNorm for CPUs
            module = nn.SyncBatchNorm.convert_sync_batchnorm(module)
        self.model = wrap(module.to(device), settings, device)
        parameters = self.model.parameters()
        self.optimizer = torch.optim.SGD(parameters, lr=settings.rate, momentum=0.9, nesterov=True)
        scaled = settings.precision == "fp16"
        self.scaler = torch.amp.GradScaler(device.type, enabled=scaled)
        self.data = shapes(settings.samples, settings.seed)
        self.validation = shapes(VALIDATION, settings.seed + 1)
        self.sampler = ResumableSampler(self.data, seed=settings.seed, drop_last=True)
        # Other random numbers on every rank, from here on: dropout and augmentation.
        torch.manual_seed(settings.seed + 1 + dist.get_rank())

    @property
    def trained(self) -> checkpoint.Trained:
        return checkpoint.Trained(self.model.module, self.optimizer, self.scaler, self.device)

    def save(self, path: Path) -> None:
        checkpoint.save(path, self.trained, self.steps, asdict(self.settings))

    def resume(self, path: Path) -> None:
        self.steps = checkpoint.resume(path, self.trained, asdict(self.settings))

    def epoch(self) -> Iterator[Tensor]:
        """Make the rest of an epoch's steps; yield this rank's mean loss of each."""
        settings, per_epoch = self.settings, self.settings.steps_per_epoch
        number, done = divmod(self.steps, per_epoch)
        self.sampler.start(number, done * settings.accumulate * settings.batch)
        batches = iter(self.loader(self.data, settings.batch, self.sampler))
        for _ in range(per_epoch - done):
            loss = self.step(list(islice(batches, settings.accumulate)))
            self.steps += 1
            yield loss

    def loader(
        self, data: Dataset[Any], batch: int, order: Sampler[int] | None = None
    ) -> DataLoader[Any]:
        # With a generator of its own: by default every pass takes a number from torch's global one,
        # whose state is in the checkpoint, and a run that resumes after a pass would have others.
        pinned, own = self.device.type == "cuda", torch.Generator()
        return DataLoader(data, batch, sampler=order, generator=own, pin_memory=pinned)

    def step(self, batches: Sequence[Sequence[Tensor]]) -> Tensor:
        """Make one optimizer step over several batches; gradients travel with the last one."""
        for options in self.optimizer.param_groups:
            options["lr"] = learning_rate(self.steps, self.settings)
        self.optimizer.zero_grad()
        total = torch.zeros((), device=self.device)
        for index, (pictures, labels) in enumerate(batches):
            last = index == len(batches) - 1
            with nullcontext() if last else self.model.no_sync():
                loss = self.loss(augment(pictures), labels) / len(batches)
                self.scaler.scale(loss).backward()
            total += loss.detach()
        # All ranks hold the same averages, so an overflow on one makes all skip this step.
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return total

    def loss(self, pictures: Tensor, labels: Tensor) -> Tensor:
        dtype = PRECISIONS[self.settings.precision]
        with torch.autocast(self.device.type, dtype, enabled=dtype is not None):
            scores = self.model(pictures.to(self.device, non_blocking=True))
            return F.cross_entropy(scores.float(), labels.to(self.device, non_blocking=True))

    @torch.no_grad()
    def accuracy(self) -> float:
        """Collective. The share of validation pictures classified rightly, each counted once."""
        # The bare module: ranks may hold different numbers of pictures here, and a wrapped forward
        # would broadcast buffers.
        module = self.model.module
        for buffer in module.buffers():  # without SyncBatchNorm, ranks have statistics of their own
            dist.broadcast(buffer, 0)
        mine = range(dist.get_rank(), len(self.validation), dist.get_world_size())
        right = torch.zeros((), device=self.device)
        module.eval()
        for pictures, labels in self.loader(Subset(self.validation, mine), 256):
            right += (module(pictures.to(self.device)).argmax(1) == labels.to(self.device)).sum()
        module.train()
        dist.all_reduce(right)
        return right.item() / len(self.validation)

    def digest(self) -> str:
        """Collective. SHA-256 of weights and buffers; RuntimeError where ranks hold others."""
        state = self.model.module.state_dict()
        raw = b"".join(t.detach().cpu().contiguous().numpy().tobytes() for t in state.values())
        mine = hashlib.sha256(raw).hexdigest()
        everyones: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyones, mine)
        if len(set(everyones)) != 1:
            raise RuntimeError(f"ranks hold different weights: {everyones}")
        return mine


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def train(settings: Settings, saving: Saving, device: torch.device) -> Result:
    """Train to the end of the last epoch, in the process group that is there.

    Raises:
        ValueError: there is too little data for a step, or a checkpoint is of another run.
    """
    trainer, rates, loss, accuracy = Trainer(settings, device), [], math.nan, math.nan
    if saving.resume and saving.path is not None:
        trainer.resume(saving.path)
        say(f"continuing after step {trainer.steps}" if trainer.steps else "no checkpoint yet")
    per_epoch = settings.steps_per_epoch
    while trainer.steps < settings.epochs * per_epoch:
        losses, started, first = [], time.monotonic(), trainer.steps
        for step_loss in trainer.epoch():
            losses.append(step_loss)
            rates.append(trainer.optimizer.param_groups[0]["lr"])
            if saving.path is not None and saving.every and trainer.steps % saving.every == 0:
                trainer.save(saving.path)
                say(f"checkpoint after step {trainer.steps}: {saving.path.name}")
        pictures = (trainer.steps - first) * settings.batch * settings.accumulate
        speed = pictures * dist.get_world_size() / (time.monotonic() - started)
        mean = torch.stack(losses).mean()
        dist.all_reduce(mean)
        loss, accuracy = mean.item() / dist.get_world_size(), trainer.accuracy()
        say(
            f"epoch {trainer.steps // per_epoch} of {settings.epochs}: loss {loss:.4f}, "
            f"validation accuracy {accuracy:.1%}, rate {rates[-1]:.4f}, {speed:,.0f} pictures/s"
        )
    if saving.path is not None:
        trainer.save(saving.path)
    return Result(loss, accuracy, trainer.digest(), tuple(rates))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="torchrun --nproc-per-node=N -m examples.training",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    choices = {"precision": PRECISIONS, "wrapper": ("fastsync", "torch")}
    for option in fields(Settings):
        parser.add_argument(
            f"--{option.name}",
            type=type(option.default),
            default=option.default,
            choices=choices.get(option.name),
            help=f"{option.metadata['help']} (default: {option.default})",
        )
    parser.add_argument("--checkpoint", type=Path, help="file that rank 0 writes (default: none)")
    parser.add_argument("--every", type=int, default=16, help="steps between two (default: 16)")
    parser.add_argument(
        "--resume", action="store_true", help="continue from --checkpoint, where it exists"
    )
    args = parser.parse_args()
    if args.resume and args.checkpoint is None:
        parser.error("--resume needs --checkpoint")
    if "RANK" not in os.environ:
        parser.error("start it with torchrun --nproc-per-node=2 -m examples.training")
    return args


def main() -> int:
    args = _parse()
    settings = Settings(**{name: getattr(args, name) for name in asdict(Settings())})
    saving = Saving(args.checkpoint, args.every, args.resume)
    device = torch.device("cpu")
    if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        result = train(settings, saving, device)
        say(f"weights sha256 {result.digest}")
        dist.barrier()
    except ValueError as error:  # the same on every rank
        if dist.get_rank() == 0:
            print(f"error: {error}", file=sys.stderr)
        return 2
    finally:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
