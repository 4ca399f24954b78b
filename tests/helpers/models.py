"""Small versions of the models that fastsync is measured on, and the steps that train them."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from fastsync import FastDDP


def many(layers=100, width=64):
    """Many small tensors: 4 parameters per layer."""
    parts = []
    for _ in range(layers):
        parts += [nn.Linear(width, width), nn.LayerNorm(width), nn.ReLU()]
    return nn.Sequential(*parts)


class Transformer(nn.Module):
    """A language model in miniature, its output layer tied to its embedding."""

    def __init__(self, vocabulary=50, width=32, layers=2):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.blocks(self.embed(tokens)))


def wide(width=256, layers=3):
    """Few large tensors."""
    parts = []
    for _ in range(layers):
        parts += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*parts)


class ConvNet(nn.Module):
    """Convolutions with BatchNorm, whose running statistics are buffers."""

    def __init__(self, channels=8):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, channels, 3, padding=1),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 1),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
        )
        self.head = nn.Linear(channels, 10)

    def forward(self, images):
        return self.head(self.body(images).flatten(1))


MODELS = {
    "many": lambda: many(12, 16),
    "transformer": Transformer,
    "wide": wide,
    "conv": ConvNet,
}

OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
}


class Skipping(nn.Module):
    """Leaves its second layer out where it is told to; what comes after that one is never used."""

    def __init__(self, layers, width):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x, both):
        x = self.layers[0](x)
        return self.layers[1](x) if both else x


def build(name, seed=0):
    """The same weights on every rank."""
    torch.manual_seed(seed)
    return MODELS[name]()


def batch(name, seed):
    generator = torch.Generator().manual_seed(seed)
    if name == "transformer":
        return torch.randint(50, (2, 6), generator=generator)
    sizes = {"many": (4, 16), "wide": (4, 256), "conv": (2, 3, 8, 8)}
    return torch.randn(sizes[name], generator=generator)


def loss_of(output):
    return output.square().mean()


def wrap(kind, model, **options):
    """`model` in FastDDP or in torch's DDP, whichever `kind` names."""
    return FastDDP(model, **options) if kind == "fast" else DDP(model, **options)


def state(model):
    """A copy of all weights and buffers."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def grads(model):
    """A copy of all gradients by name, None where there is none."""
    named = ((n.removeprefix("module."), p) for n, p in model.named_parameters())
    return {n: None if p.grad is None else p.grad.detach().clone() for n, p in named}


def differences(one, other):
    """Names under which two dictionaries of tensors differ in any bit."""

    def same(a, b):
        if a is None or b is None:
            return a is b
        return torch.equal(a.nan_to_num(0.25), b.nan_to_num(0.25)) and torch.equal(
            a.isnan(), b.isnan()
        )

    assert one.keys() == other.keys()
    return [name for name in one if not same(one[name], other[name])]


def buffers(gradients):
    """Return where the flat buffers of gradients begin, whose slots are less than 16 elements
    apart.
    """
    starts, end = [], None
    for grad in sorted(gradients, key=lambda g: g.data_ptr()):
        if end is None or grad.data_ptr() - end >= 16 * grad.itemsize:
            starts.append(grad.data_ptr())
        end = grad.data_ptr() + grad.nbytes
    return starts
