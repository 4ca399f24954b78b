"""A wire format of your own, in Python or in C++: the sign of each gradient, and their mean size.

    python -m examples.custom_codec                      # SignCodec, two ranks
    python -m examples.custom_codec --cpp                # the same in C++: custom_codec.cpp
    python -m examples.custom_codec --wire int8          # any other format, for comparison

Trains a small network, prints its loss and the bytes that it sent, and ends with 1 where the loss
did not halve. Explained in docs/wire.md. (The format is that of Seide et al., "1-bit
stochastic gradient descent", 2014, with one scale per block of 64 elements.)
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import fastsync
from fastsync.testing import run_ranks

HERE = Path(__file__).resolve().parent
SOURCE = HERE / "custom_codec.cpp"


class SignCodec(fastsync.Codec):
    """One bit per element, and the mean magnitude of each 64."""

    name = "signs"
    block = 64
    form = "gather"

    def coded_bytes(self, numel: int) -> int:
        return numel // 8 + numel // 64 * 4

    def encode(self, values: torch.Tensor, payload: torch.Tensor) -> None:
        bits, scales = self.parts(payload)
        scales.copy_(values.view(-1, 64).abs().mean(1))
        ones = (values >= 0).view(-1, 8)
        bits.copy_((ones * self.weights(values.device)).sum(1))

    def decode(self, payload: torch.Tensor, values: torch.Tensor) -> None:
        bits, scales = self.parts(payload)
        ones = bits.view(-1, 1).bitwise_and(self.weights(payload.device)) > 0
        values.copy_(ones.view(-1) * 2.0 - 1.0)
        values.view(-1, 64).mul_(scales.view(-1, 1))

    def parts(self, payload: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of n elements: n / 8 bytes of signs, then n / 64 scales."""
        ones = payload.numel() * 2 // 3
        return payload[:ones], payload[ones:].view(torch.float32)

    def weights(self, device: torch.device) -> torch.Tensor:
        return 2 ** torch.arange(8, device=device, dtype=torch.uint8)


def compile_plugin(folder: Path) -> Path:
    """The codec of custom_codec.cpp as a shared library."""
    library = folder / "libsigns.so"
    include = ["-I", str(fastsync.include_dir())]
    flags = ["-std=c++17", "-O3", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    subprocess.run(["c++", *flags, *include, str(SOURCE), "-o", str(library)], check=True)
    return library


def train(rank: int, world: int, wire: str, library: str, steps: int) -> tuple[list[float], int]:
    """Losses over all ranks' data, and the bytes that this rank sent in one step."""
    fastsync.register_codec("signs", SignCodec)
    if library:
        fastsync.register_codec("signs-cpp", lambda: fastsync.load_codec(library))
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1))
    model = fastsync.FastDDP(network, wire=fastsync.Wire(wire, shared_memory=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    data = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(steps):
        inputs = torch.randn(32, 64, generator=data)
        wanted = inputs[:, :8].sum(1, keepdim=True).tanh()
        optimizer.zero_grad()
        loss = (model(inputs) - wanted).square().mean()
        loss.backward()
        optimizer.step()
        mean = loss.detach() / world
        dist.all_reduce(mean)
        losses.append(mean.item())
    return losses, model.sync_stats()["sent_bytes"] // steps


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--wire", default="signs", help="what gradients travel as (signs)")
    parser.add_argument("--cpp", action="store_true", help="the codec in custom_codec.cpp")
    parser.add_argument("--ranks", type=int, default=2, help="processes (2)")
    parser.add_argument("--steps", type=int, default=200, help="training steps (200)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        library = str(compile_plugin(Path(folder))) if options.cpp else ""
        wire = "signs-cpp" if options.cpp else options.wire
        results = run_ranks(train, options.ranks, wire, library, options.steps)
    losses, sent = results[0]
    print(f"{wire}: {sent} bytes sent per step and rank")
    for step in range(0, options.steps, max(1, options.steps // 10)):
        print(f"step {step:4d}  loss {losses[step]:.4f}")
    print(f"last       loss {losses[-1]:.4f}")
    return 0 if losses[-1] < losses[0] / 2 else 1


if __name__ == "__main__":
    sys.exit(main())
