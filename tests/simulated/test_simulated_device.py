"""The simulated device by itself: plain torch on it, what waits, and memory that is reused."""

import pytest
import torch
from torch import nn

from tests.helpers import models
from tests.simulated.ranks import run_simulated

DEVICE = "sim"


def low():
    from tests.simulated.device import low

    return low


def trained(name, optimizer, device):
    from tests.simulated.device import placed

    model = placed(models.build(name), device)
    opt = models.OPTIMIZERS[optimizer](model.parameters())
    for step in range(3):
        opt.zero_grad()
        models.loss_of(model(models.batch(name, step).to(device))).backward()
        opt.step()
    return {key: value.cpu() for key, value in model.state_dict().items()}


def on_both(rank, world):
    return {
        (name, optimizer): [trained(name, optimizer, device) for device in (DEVICE, "cpu")]
        for name in models.MODELS
        for optimizer in (["sgd"] if name == "transformer" else models.OPTIMIZERS)
    }


def test_training_is_the_cpus():
    """However the streams lag. AdamW would make much of gradients that are 0 but for rounding."""
    for (name, _), (got, wanted) in run_simulated(on_both, 1)[0].items():
        for key, value in wanted.items():
            assert torch.allclose(got[key], value, rtol=1e-4, atol=1e-6), f"{name}: {key}"


def waits_of(call):
    low().report(reset=True)
    call()
    return [wait.split(" at ")[0] for wait in low().report().waits]


def host_waits(rank, world):
    x, host = torch.ones(5, device=DEVICE), torch.ones(5)
    pinned = host.pin_memory()
    stream, event = torch.sim.Stream(), torch.sim.Event()
    event.record()
    found = {
        "add": lambda: x + x,
        "item": lambda: x.sum().item(),
        "cpu": lambda: x.cpu(),
        "to": lambda: host.to(DEVICE),
        "to, pageable": lambda: host.to(DEVICE, non_blocking=True),
        "to, pinned": lambda: pinned.to(DEVICE, non_blocking=True),
        "from, pinned": lambda: pinned.copy_(x, non_blocking=True),
        "bool": lambda: bool((x > 0).all()),
        "nonzero": lambda: x.nonzero(),
        "stream": stream.synchronize,
        "wait_event": lambda: stream.wait_event(event),
        "linear": lambda: nn.functional.linear(x, torch.ones(3, 5, device=DEVICE)),
    }
    return {name: len(waits_of(call)) for name, call in found.items()}


def test_what_waits_is_counted():
    never = ("add", "to, pinned", "from, pinned", "wait_event", "linear")
    found = run_simulated(host_waits, 1)[0]
    assert found == {name: int(name not in never) for name in found}


def refused(rank, world):
    x = torch.ones(3, device=DEVICE)
    low().refuse_waits(True)
    try:
        y = x + 1
        with pytest.raises(
            RuntimeError, match=r"a host wait was refused: item at .*test_simulated_device"
        ):
            low_where(lambda: y.sum().item())
    finally:
        low().refuse_waits(False)
    return y.tolist()


def low_where(call):
    from tests.simulated.device import _where

    low().ask_where(_where)
    try:
        return call()
    finally:
        low().ask_where(None)


def test_waits_can_be_refused():
    assert run_simulated(refused, 1) == [[2.0, 2.0, 2.0]]


def reuse(rank, world, recorded):
    """A side stream reads what the default stream frees. What it has read."""
    low().set_lag(0.0)
    x = torch.full((1000,), 3.0, device=DEVICE)
    side = torch.sim.Stream()
    side.wait_stream(torch.sim.current_stream())
    with torch.sim.stream(side):
        low().sleep(0.2)
        y = x * 2
    if recorded:
        x.record_stream(side)
    address = x.data_ptr()
    del x
    again = torch.empty(1000, device=DEVICE)
    torch.sim.current_stream().wait_stream(side)
    return again.data_ptr() == address, y.sum().item()


def test_memory_that_is_handed_out_again_is_overwritten():
    (reused, total), (kept, right) = (
        run_simulated(reuse, 1, recorded)[0] for recorded in (False, True)
    )
    assert reused and total != total
    assert not kept and right == 6000.0


def memory(rank, world):
    low().report(reset=True)
    before = low().report().allocated
    x = torch.empty(1 << 18, device=DEVICE)
    y = x + 1
    del x
    report = low().report()
    del y
    return report.peak - before, report.allocated - before, low().report().allocated - before


def test_memory_is_counted():
    assert run_simulated(memory, 1) == [(2 << 20, 1 << 20, 0)]


def lagging(rank, world):
    """In how many of some rounds each of two streams was first."""
    firsts = []
    for _ in range(40):
        events = []
        for stream in (torch.sim.Stream(), torch.sim.Stream()):
            with torch.sim.stream(stream):
                for _ in range(4):
                    torch.ones(8, device=DEVICE).add_(1)
                events.append(torch.sim.Event(enable_timing=True))
                events[-1].record()
        low().synchronize()
        firsts.append(events[0].elapsed_time(events[1]) > 0)
    return sum(firsts)


def test_streams_lag_at_random():
    assert 2 < run_simulated(lagging, 1)[0] < 38
