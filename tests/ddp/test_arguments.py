"""Arguments that torch's own tests leave unchecked: bucket sizes, delayed parameters, nesting,
pickles."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel

from fastsync import FastDDP
from fastsync.config.policy import BucketPolicy, SyncPolicy
from fastsync.config.topology import Network
from fastsync.wire.formats import Wire
from tests.helpers.models import buffers
from tests.helpers.teams import run_ranks

BOTH = (FastDDP, DistributedDataParallel)


def layers(depth=4, width=16):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))


def rows(rank, step, width=16):
    return torch.randn(3, width, generator=torch.Generator().manual_seed(100 * rank + step))


def gradients(wrapped):
    return [p.grad for p in wrapped.parameters()]


def equal(ours, theirs):
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


def bucket_sizes(rank, world, options):
    wrapped = FastDDP(layers(depth=8, width=64), **options)
    for step in range(3):  # the second plan follows rank 0's order
        wrapped(rows(rank, step, 64)).sum().backward()
    data = wrapped._get_ddp_logging_data()
    logged = [int(size) for size in data["rebuilt_bucket_sizes"].split(", ")]
    places = buffers(gradients(wrapped))
    return logged, len(wrapped.sync_stats()["buckets"]), len(places)


LAYER = 4 * (64 * 64 + 64)


@pytest.mark.slow(but=("a cap",))
@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({}, [8 * LAYER]),
        ({"bucket_cap_mb": 2 * LAYER / 2**20}, [2 * LAYER] * 4),
        ({"bucket_cap_mb_list": [LAYER / 2**20, 3 * LAYER / 2**20]}, [1, 3, 3, 1]),
    ],
    ids=["default", "a cap", "a list of caps"],
)
def test_bucket_sizes_take_effect(options, sizes):
    expected = [size * LAYER if size < 10 else size for size in sizes]
    for logged, planned, seen in run_ranks(bucket_sizes, 2, options):
        assert logged == expected
        assert planned == seen == len(expected)


def delayed(rank, world, names):
    results = []
    for cls in BOTH:
        module = layers()
        chosen = [(name, p) for name, p in module.named_parameters() if name in names]
        first = module[0].weight  # its gradient comes last
        wrapped = cls(
            module,
            delay_all_reduce_named_params=chosen,
            param_to_hook_all_reduce=first,
        )
        steps = []
        for step in range(2):
            wrapped.zero_grad()
            wrapped(rows(rank, step)).square().sum().backward()
            dist.barrier()  # torch's class does not wait for its all-reduce
            steps += [g.clone() for g in gradients(wrapped)]
        results.append(steps)
    return equal(*results)


def test_delayed_parameters():
    assert run_ranks(delayed, 2, ["2.weight", "3.weight", "3.bias"]) == [True, True]


class Outer(nn.Module):
    """Wrapped parts inside of a module, one of them in another process group."""

    def __init__(self, cls, group):
        super().__init__()
        self.first = cls(layers(2))
        self.plain = layers(1)
        self.second = cls(layers(2), process_group=group)

    def forward(self, x):
        return self.second(self.plain(self.first(x)))


def nested(rank, world):
    group = dist.new_group([0, 1])
    results = []
    for cls in BOTH:
        outer = Outer(cls, group)
        steps = []
        for step in range(3):
            outer.zero_grad()
            outer(rows(rank, step)).square().sum().backward()
            steps += [g.clone() for g in gradients(outer)]
        results.append((steps, sorted(outer.state_dict())))
    local = outer.plain[0].weight.grad
    parts = [torch.empty_like(local) for _ in range(world)]
    dist.all_gather(parts, local)
    return equal(results[0][0], results[1][0]), results[0][1] == results[1][1], torch.equal(*parts)


def test_inside_other_modules():
    assert run_ranks(nested, 2) == [(True, True, False)] * 2


class Counts(Joinable):
    """Sums how many ranks take part in each step, beside a model in the same join()."""

    def __init__(self):
        super().__init__()
        self.total = torch.zeros(1)
        self.last = None

    def __call__(self):
        Join.notify_join_context(self)
        ones = torch.ones(1)
        dist.all_reduce(ones)
        self.total += ones

    def join_hook(self, **kwargs):
        counter = self

        class Hook(JoinHook):
            def main_hook(self):
                dist.all_reduce(torch.zeros(1))

            def post_hook(self, is_last_joiner):
                counter.last = is_last_joiner

        return Hook()

    @property
    def join_device(self):
        return torch.device("cpu")

    @property
    def join_process_group(self):
        return dist.group.WORLD


def joined(rank, world):
    results = []
    for cls in BOTH:
        wrapped, counter = cls(layers()), Counts()
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        with Join([wrapped, counter]):
            for step in range(2 + 2 * rank):
                optimizer.zero_grad()
                wrapped(rows(rank, step)).square().mean().backward()
                counter()  # joined ranks follow in the order of the list
                optimizer.step()
        weights = [p.detach().clone() for p in wrapped.parameters()]
        results.append((weights, counter.total.item(), counter.last))
    (ours, *rest), (theirs, *their_rest) = results
    return equal(ours, theirs), rest, their_rest


def test_join_with_another_joinable():
    results = run_ranks(joined, 2)
    for same, ours, theirs in results:
        assert same
        assert ours == theirs
    totals = [ours[0] for _, ours, _ in results]
    assert totals == [4, 6], "two steps of both ranks, then two of one"


# --- Policies: what is accepted and what it becomes


MIB = 1 << 20


@pytest.mark.parametrize(
    ("cap", "caps", "wanted"),
    [
        (None, None, (MIB, 25 * MIB)),
        (10, None, (10 * MIB,)),
        (0.5, None, (MIB // 2,)),
        (1e-9, None, (1,)),
        (None, [1, 2, 3], (MIB, 2 * MIB, 3 * MIB)),
        (7, [1, 2], (MIB, 2 * MIB)),
    ],
)
def test_bucket_caps(cap, caps, wanted):
    assert BucketPolicy.from_mb(cap, caps).caps == wanted


def test_buckets_shrink_on_slow_networks_where_nobody_chose_their_size():
    free, chosen = BucketPolicy.from_mb(None), BucketPolicy.from_mb(25)
    assert free.on(Network()) == free
    assert free.on(Network(1e12)) == BucketPolicy((MIB, 25 * MIB), True, 25 * MIB)
    assert free.on(Network(2e9)) == BucketPolicy((MIB, 10_000_000), True, 4_000_000)
    assert free.on(Network(1e6)) == BucketPolicy((MIB, 4 * MIB), True, MIB)
    assert chosen.on(Network(1e6)) == chosen


def test_buckets_make_up_for_latency():
    free = BucketPolicy.from_mb(None)
    assert free.on(Network(100e6, 1e-3)).caps == free.on(Network(100e6)).caps
    assert free.on(Network(100e6, 0.1)) == BucketPolicy((MIB, 25 * MIB), True, 25 * MIB)


def test_buckets_shrink_towards_the_last_one_which_nothing_hides():
    policy = BucketPolicy((100,), last=10)
    assert policy.limit(closed=3, left=1000) == 100
    assert policy.limit(closed=3, left=60) == 30
    assert policy.limit(closed=3, left=5) == 10
    assert BucketPolicy((100, 50)).limit(closed=0, left=5) == 100
    assert BucketPolicy((100, 50)).limit(closed=7, left=5) == 50


@pytest.mark.parametrize("cap", [0, -1, -0.5, float("nan"), float("inf")])
def test_wrong_bucket_caps(cap):
    with pytest.raises(ValueError, match="bucket_cap_mb"):
        BucketPolicy.from_mb(cap)
    with pytest.raises(ValueError, match="bucket_cap_mb"):
        BucketPolicy.from_mb(None, [1, cap])


def test_wrong_policies():
    for caps in ((), (0,), (1, -1)):
        with pytest.raises(ValueError, match="must be positive"):
            BucketPolicy(caps)
    with pytest.raises(ValueError, match=r"'fp4'.*'fp32'.*'bf16'.*'fp16'"):
        SyncPolicy(wire=Wire("fp4"))
