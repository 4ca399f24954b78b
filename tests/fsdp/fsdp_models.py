"""Models and steps for tests of units: fastsync.fully_shard, torch's, and no sharding at all."""

import torch
from torch import nn, optim
from torch.distributed.device_mesh import init_device_mesh

WORDS, WIDTH = 11, 17


class Block(nn.Module):
    """Sizes that no number of ranks divides, some smaller than it."""

    def __init__(self, width=WIDTH):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width + 1)
        self.down = nn.Linear(3 * width + 1, width)
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x)))) * self.gain


class Net(nn.Module):
    """Blocks between an embedding and a head that is tied to it."""

    def __init__(self, blocks=3, width=WIDTH):
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        # In a wide model a word would be its own answer from the start, and gradients be zero.
        self.embed.weight.data.mul_((WIDTH / width) ** 0.5)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words):
        x = self.embed(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def net(blocks=3, width=WIDTH):
    torch.manual_seed(0)
    return Net(blocks, width)


def words(rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, WORDS, (4, 5), generator=generator)


def loss_of(model, batch):
    return nn.functional.cross_entropy(model(batch).flatten(0, 1).float(), batch.flatten())


OPTIMIZERS = {
    "sgd": lambda p: optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda p: optim.AdamW(p, 0.01),
}


def apply(shard, model, **options):
    """A unit per block, and the root's."""
    for block in model.blocks:
        shard(block, **options)
    return shard(model, **options)


def mesh_of(world, rows=None):
    if rows is None:
        return init_device_mesh("cpu", (world,))
    return init_device_mesh("cpu", (rows, world // rows), mesh_dim_names=("replicas", "shards"))


def whole(params):
    return [getattr(p, "full_tensor", lambda p=p: p)().detach().clone() for p in params]


def train(model, rank, optimizer, steps=4, clip=0.5):
    """Weights, and the norms of gradients before clipping."""
    norms = []
    for step in range(steps):
        loss_of(model, words(rank, step)).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        norms.append(float(getattr(norm, "full_tensor", lambda n=norm: n)()))
        optimizer.step()
        optimizer.zero_grad()
    return whole(model.parameters()), norms


def train_alone(world, make, steps=4, clip=0.5, batches=1, model=None):
    """Train one process with the batches of all ranks, so many of each in a step."""
    model = model or net()
    optimizer = OPTIMIZERS[make](model.parameters())
    for step in range(steps):
        for rank in range(world):
            for batch in range(batches * step, batches * (step + 1)):
                (loss_of(model, words(rank, batch)) / world).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def farthest(found, wanted):
    return max(float((a - b).detach().abs().max()) for a, b in zip(found, wanted, strict=True))
