"""Random collectives over MPI, against Gloo and against sums written out.

    mpirun -n 3 python -m tests.mpi.random_collectives --count 2500 --seed 7

All ranks draw the same cases, and the tensors of all ranks. So each rank knows what every other one
passes, and what must come: to the bit, with sums in the order of the ranks, 16 bits in fp32. Where
Gloo has the same collective, its result is compared too.
"""

import argparse
import random
import sys
import time
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
HALVES = (torch.float16, torch.bfloat16)
REALS = (torch.float64, torch.float32, *HALVES)
INTS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool)
COMPLEX = (torch.complex64, torch.complex128)
MOVED = (*REALS, *INTS, *COMPLEX, *FP8)
OPERATIONS = {
    "SUM": (torch.add, (*REALS, *INTS, *COMPLEX)),
    "AVG": (torch.add, REALS),
    "PRODUCT": (torch.mul, (*REALS, *INTS)),
    "MIN": (torch.minimum, (*REALS, *INTS)),
    "MAX": (torch.maximum, (*REALS, *INTS)),
    "BAND": (torch.bitwise_and, INTS),
    "BOR": (torch.bitwise_or, INTS),
    "BXOR": (torch.bitwise_xor, INTS),
}
GLOO_REDUCES = (*REALS, torch.uint8, torch.int8, torch.int32, torch.int64)


def combined(tensors, name):
    """Return what all ranks should get."""
    combine, dtype = OPERATIONS[name][0], tensors[0].dtype
    total = tensors[0].float() if dtype in HALVES else tensors[0].clone()
    for tensor in tensors[1:]:
        total = combine(total, tensor.to(total.dtype))
    return (total / len(tensors) if name == "AVG" else total).to(dtype)


def bits(tensor):
    plain = torch.empty(tensor.numel(), dtype=tensor.dtype)
    plain.copy_(tensor.resolve_conj().flatten())
    return plain.view(torch.uint8)


@dataclass
class Case:
    """One collective of the ranks of a group.

    Attributes:
        draw: alike on all ranks.
        ours: the MPI group; theirs: Gloo's of the same ranks.
    """

    draw: random.Random
    ours: dist.ProcessGroup
    theirs: dist.ProcessGroup
    words: list = field(default_factory=list)
    compared: int = 0

    @property
    def rank(self):
        return self.ours.rank()

    @property
    def size(self):
        return self.ours.size()

    def shape(self, least=0):
        kind = self.draw.random()
        if kind < 0.1 and not least:
            return (0,)
        if kind < 0.15:
            return ()
        if kind < 0.75:
            return tuple(self.draw.randint(1, 9) for _ in range(self.draw.randint(1, 3)))
        return (self.draw.randint(1000, 90_000),)

    def tensor(self, shape, dtype):
        """Small whole numbers, which add up alike in any order, or others."""
        exact = self.draw.random() < 0.7
        seed = self.draw.getrandbits(40)
        source = torch.Generator().manual_seed(seed)
        if dtype == torch.bool:
            made = torch.randint(0, 2, shape, generator=source).bool()
        elif dtype in INTS:
            made = torch.randint(0, 20, shape, generator=source).to(dtype)
        elif dtype in COMPLEX:
            made = torch.randn((*shape, 2), generator=source, dtype=torch.float64)
            made = torch.view_as_complex(made).to(dtype)
        elif exact:
            made = torch.randint(-4, 5, shape, generator=source).to(dtype)
        else:
            made = torch.randn(shape, generator=source).to(dtype)
        return made, exact

    def everyones(self, shape, dtype):
        drawn = [self.tensor(shape, dtype) for _ in range(self.size)]
        return [t for t, _ in drawn], all(exact for _, exact in drawn)

    def laid(self, tensor):
        """The same, sometimes in memory with gaps or in another order."""
        kind = self.draw.random()
        tensor = tensor.clone()
        if kind < 0.15 and tensor.dim() == 1 and tensor.numel():
            wide = torch.empty(2 * tensor.numel(), dtype=tensor.dtype)
            wide[::2] = tensor
            return wide[::2]
        if kind < 0.15 and tensor.dim() > 1:
            return tensor.transpose(0, -1).contiguous().transpose(0, -1)
        return tensor

    def expect(self, what, got, due):
        self.compared += 1
        if got.shape != due.shape or not torch.equal(bits(got), bits(due)):
            raise AssertionError(f"{what}: {' '.join(map(str, self.words))}: {got} is not {due}")

    def against_gloo(self, got, run, exact):
        """`run` is given Gloo's group, and returns what comes. Gloo rounds each partial sum."""
        due = run(self.theirs)
        self.compared += 1
        whole = exact or not (got.is_floating_point() or got.is_complex())
        room = 0 if whole else self.size * torch.finfo(got.dtype).eps * float(got.abs().max())
        if not (torch.equal(got, due) if whole else torch.allclose(got, due, 0, room)):
            raise AssertionError(f"Gloo: {' '.join(map(str, self.words))}: {got} is not {due}")

    def operation(self):
        name = self.draw.choice(list(OPERATIONS))
        dtype = self.draw.choice(OPERATIONS[name][1])
        self.words += [name, dtype]
        return name, dtype

    def started(self, start):
        """Asynchronously or not; by its future or not."""
        work = start(self.draw.random() < 0.5)
        if work is not None:
            work.get_future().wait() if self.draw.random() < 0.3 else work.wait()


def on_gloo(name, dtype):
    return dtype in GLOO_REDUCES and not (name in ("BAND", "BOR", "BXOR") and dtype in REALS)


def all_reduce(case):
    name, dtype = case.operation()
    tensors, exact = case.everyones(case.shape(), dtype)
    op, mine = getattr(dist.ReduceOp, name), case.laid(tensors[case.rank])
    case.started(lambda later: dist.all_reduce(mine, op, group=case.ours, async_op=later))
    case.expect("all_reduce", mine, combined(tensors, name))
    if on_gloo(name, dtype) and name not in ("PRODUCT", "AVG") and mine.numel():

        def run(group):
            other = tensors[case.rank].clone()
            dist.all_reduce(other, op, group=group)
            return other

        case.against_gloo(mine, run, exact)


def all_reduce_coalesced(case):
    name, dtype = case.operation()
    many = [case.everyones(case.shape(), dtype)[0] for _ in range(case.draw.randint(1, 3))]
    mine = [case.laid(tensors[case.rank]) for tensors in many]
    op = getattr(dist.ReduceOp, name)
    if dtype in COMPLEX:
        return
    dist.all_reduce_coalesced(mine, op, group=case.ours)
    for tensors, got in zip(many, mine, strict=True):
        case.expect("all_reduce_coalesced", got, combined(tensors, name))


def reduce(case):
    name, dtype = case.operation()
    tensors, _ = case.everyones(case.shape(), dtype)
    root, mine = case.draw.randrange(case.size), case.laid(tensors[case.rank])
    op = getattr(dist.ReduceOp, name)
    case.started(
        lambda later: dist.reduce(mine, group_dst=root, op=op, group=case.ours, async_op=later)
    )
    is_root = case.rank == root
    case.expect("reduce", mine, combined(tensors, name) if is_root else tensors[case.rank])


def broadcast(case):
    dtype = case.draw.choice(MOVED)
    case.words += [dtype]
    tensors, _ = case.everyones(case.shape(), dtype)
    root, mine = case.draw.randrange(case.size), case.laid(tensors[case.rank])
    case.started(
        lambda later: dist.broadcast(mine, group_src=root, group=case.ours, async_op=later)
    )
    case.expect("broadcast", mine, tensors[root])


def all_gather(case):
    dtype = case.draw.choice(MOVED)
    case.words += [dtype]
    tensors, _ = case.everyones(case.shape(), dtype)
    out = [case.laid(torch.zeros_like(t)) for t in tensors]
    mine = case.laid(tensors[case.rank])
    case.started(lambda later: dist.all_gather(out, mine, group=case.ours, async_op=later))
    for got, due in zip(out, tensors, strict=True):
        case.expect("all_gather", got, due)


def all_gather_flat(case):
    dtype = case.draw.choice(MOVED)
    case.words += [dtype]
    tensors, _ = case.everyones((case.draw.choice([0, 1, 7, 5000]), 2), dtype)
    whole = torch.zeros_like(torch.cat(tensors))
    mine = tensors[case.rank].clone()
    if case.draw.random() < 0.3:  # in place
        mine = whole.tensor_split(case.size)[case.rank]
        mine.copy_(tensors[case.rank])
    case.started(
        lambda later: dist.all_gather_into_tensor(whole, mine, group=case.ours, async_op=later)
    )
    case.expect("all_gather_into_tensor", whole, torch.cat(tensors))


def reduce_scatter(case):
    name, dtype = case.operation()
    rows = [case.everyones((case.draw.choice([1, 3, 4000]), 2), dtype)[0]]
    rows += [case.everyones(rows[0][0].shape, dtype)[0] for _ in range(case.size - 1)]
    op, due = getattr(dist.ReduceOp, name), combined([row[case.rank] for row in rows], name)
    mine = [case.laid(t) for t in rows[case.rank]]
    if dtype in COMPLEX:
        return
    out = case.laid(torch.zeros_like(due))
    case.started(lambda later: dist.reduce_scatter(out, mine, op, group=case.ours, async_op=later))
    case.expect("reduce_scatter", out, due)
    out.zero_()
    whole = torch.cat(mine)
    case.started(
        lambda later: dist.reduce_scatter_tensor(out, whole, op, group=case.ours, async_op=later)
    )
    case.expect("reduce_scatter_tensor", out, due)


def all_to_all(case):
    dtype = case.draw.choice(MOVED)
    case.words += [dtype]
    cuts = [[case.draw.randint(0, 5) for _ in range(case.size)] for _ in range(case.size)]
    if case.draw.random() < 0.3:
        each = case.draw.choice([1, 3, 2000])
        cuts = [[each] * case.size] * case.size
    parts = [[case.tensor((n, 2), dtype)[0] for n in cut] for cut in cuts]
    due = [parts[r][case.rank] for r in range(case.size)]
    sent, splits = torch.cat(parts[case.rank]), [len(t) for t in due]
    out = torch.zeros_like(torch.cat(due))
    case.started(
        lambda later: dist.all_to_all_single(
            out, sent, splits, cuts[case.rank], group=case.ours, async_op=later
        )
    )
    case.expect("all_to_all_single", out, torch.cat(due))
    received = [torch.zeros_like(t) for t in due]
    mine = [case.laid(t) for t in parts[case.rank]]
    case.started(lambda later: dist.all_to_all(received, mine, group=case.ours, async_op=later))
    for got, wanted in zip(received, due, strict=True):
        case.expect("all_to_all", got, wanted)


def gather_and_scatter(case):
    dtype = case.draw.choice(MOVED)
    case.words += [dtype]
    tensors, _ = case.everyones(case.shape(), dtype)
    root = case.draw.randrange(case.size)
    is_root = case.rank == root
    out = [case.laid(torch.zeros_like(t)) for t in tensors] if is_root else None
    mine = case.laid(tensors[case.rank])
    case.started(
        lambda later: dist.gather(mine, out, group_dst=root, group=case.ours, async_op=later)
    )
    for got, due in zip(out or (), tensors, strict=False):
        case.expect("gather", got, due)
    back = case.laid(torch.zeros_like(mine))
    sent = [case.laid(t) for t in tensors] if is_root else None
    case.started(
        lambda later: dist.scatter(back, sent, group_src=root, group=case.ours, async_op=later)
    )
    case.expect("scatter", back, tensors[case.rank])


def messages(case):
    dtype = case.draw.choice(MOVED)
    case.words += [dtype]
    tensors, _ = case.everyones(case.shape(), dtype)
    tag, step = case.draw.choice([0, 3, 99, 0x66617374]), case.draw.randrange(case.size)
    to, source = (case.rank + step) % case.size, (case.rank - step) % case.size
    out = case.laid(torch.zeros_like(tensors[source]))
    works = [
        dist.isend(case.laid(tensors[case.rank]), group_dst=to, group=case.ours, tag=tag),
        dist.irecv(out, group_src=source, group=case.ours, tag=tag),
    ]
    for work in works:
        work.wait()
    case.expect("send and recv", out, tensors[source])


def several_at_once(case):
    many, works = [], []
    for _ in range(case.draw.randint(2, 6)):
        name, dtype = case.operation()
        tensors, _ = case.everyones(case.shape(), dtype)
        mine = tensors[case.rank].clone()
        op = getattr(dist.ReduceOp, name)
        works.append(dist.all_reduce(mine, op, group=case.ours, async_op=True))
        many.append((mine, combined(tensors, name)))
    for work in works if case.draw.random() < 0.5 else works[::-1]:
        work.wait()
    for got, due in many:
        case.expect("one of several", got, due)


def objects(case):
    everyones = [None] * case.size
    dist.all_gather_object(everyones, {"rank": case.rank}, group=case.ours)
    assert everyones == [{"rank": rank} for rank in range(case.size)]
    case.compared += 1


KINDS = {
    all_reduce: 6,
    all_reduce_coalesced: 1,
    reduce: 2,
    broadcast: 2,
    all_gather: 2,
    all_gather_flat: 2,
    reduce_scatter: 2,
    all_to_all: 2,
    gather_and_scatter: 2,
    messages: 2,
    several_at_once: 1,
    objects: 1,
}


def groups(draw, world):
    """The default group and some of its ranks, in MPI and in Gloo."""
    members = [list(range(world))]
    members += [sorted(draw.sample(range(world), draw.randint(1, world))) for _ in range(3)]
    made = [(dist.group.WORLD, dist.new_group(backend="gloo"))]
    made += [
        (dist.new_group(ranks), dist.new_group(ranks, backend="gloo")) for ranks in members[1:]
    ]
    return list(zip(members, made, strict=True))


def run(rank, world, count, seed):
    """Run `count` cases; return how many comparisons they held."""
    draw = random.Random(f"{seed} {world}")
    known, compared = groups(draw, world), 0
    for number in range(count):
        kind = draw.choices(list(KINDS), list(KINDS.values()))[0]
        members, (ours, theirs) = draw.choice(known)
        of_case = random.Random(draw.getrandbits(64))
        if rank in members:
            case = Case(of_case, ours, theirs, [f"seed {seed}, case {number}", kind.__name__])
            kind(case)
            compared += case.compared
        if number % 20 == 19:
            dist.barrier()
    return compared


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(32))
    options = parser.parse_args()

    import fastsync.mpi

    torch.set_num_threads(1)
    dist.init_process_group(fastsync.mpi.NAME)
    seed = torch.tensor([options.seed])
    dist.broadcast(seed, 0)
    begun = time.monotonic()
    compared = run(dist.get_rank(), dist.get_world_size(), options.count, int(seed))
    totals = torch.tensor([compared])
    dist.all_reduce(totals)
    if dist.get_rank() == 0:
        print(
            f"{options.count} random collectives of {dist.get_world_size()} ranks, seed "
            f"{int(seed)}: {int(totals)} comparisons clean, {time.monotonic() - begun:.0f} s"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
