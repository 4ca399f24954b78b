"""Training libraries with FastDDP, against the same libraries with torch's DDP.

Each trains half of the steps, saves a checkpoint, and goes on from it with everything made anew.
Needs the packages of requirements-ecosystem.txt; skipped where they are missing.
"""

import contextlib
import os
import pickle

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from fastsync import FastDDP, integrations
from fastsync.testing import run_ranks
from tests.zero.zero_loops import close

TIMEOUT = 300  # the libraries take their time to import


class Numbers(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return {
            "x": torch.randn(8, generator=generator),
            "labels": torch.randn(1, generator=generator),
        }


class Model(nn.Module):
    """Model as a Trainer expects it: the loss comes with the output."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, x, labels):
        predicted = self.body(x)
        return {"loss": (predicted - labels).square().mean(), "predicted": predicted}


def as_torchrun(rank, world):
    """Set the variables that the libraries read to find out that they run distributed."""
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ.update({name: str(value) for name, value in places.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500", ACCELERATE_USE_CPU="1")
    os.environ.update(HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES="", NODE_RANK="0")


def chosen(zero, **options):
    """With FastDDP, unless `zero` is None."""
    if zero is None:
        return contextlib.nullcontext()
    return integrations.in_place_of_ddp(zero=zero, **options)


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


# By `zero` in the first and in the second half; None is torch's DDP.
TORCH = (None, None)
HALVES = [TORCH, (0, 0), (1, 1), (2, 2), (2, None), (None, 1)]


def outcomes(half, folder):
    """Return those of HALVES that end in the bits of torch's DDP, and those that do not come close.

    Args:
        half: trains by `zero`, to or from a checkpoint; returns the model's class, and the weights.
    """
    kinds, found = {}, {}
    for first, second in HALVES:
        checkpoint = f"{folder}/{first}-{second}"
        half(first, checkpoint, resumes=False)
        kinds[first, second], found[first, second] = half(second, checkpoint, resumes=True)
    assert all((kinds[zero] is FastDDP) == (zero[1] is not None) for zero in HALVES), kinds
    wanted = found[TORCH]
    assert not close(wanted, weights(Model()))
    bits = [zero for zero in HALVES if all(map(torch.equal, found[zero], wanted))]
    return bits, [zero for zero in HALVES if not close(found[zero], wanted)]


def run(train, folder, exact=((0, 0),)):
    """On two ranks, whose sums commute. Norms of shares, and averages that accumulate, round."""
    for bits, far in run_ranks(train, 2, str(folder), timeout=TIMEOUT):
        assert not far
        assert set(exact) <= set(bits)


def with_accelerate(rank, world, folder):
    as_torchrun(rank, world)
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs

    def half(zero, checkpoint, resumes):
        accelerator = Accelerator(
            cpu=True,
            gradient_accumulation_steps=2,
            kwargs_handlers=[DistributedDataParallelKwargs(bucket_cap_mb=1)],
        )
        model = Model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
        loader = DataLoader(Numbers(), batch_size=4)
        with chosen(zero, gradient_as_bucket_view=False):
            prepared = accelerator.prepare(model, optimizer, schedule, loader)
        model, optimizer, schedule, loader = prepared
        if resumes:
            accelerator.load_state(checkpoint)
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch)["loss"])
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        accelerator.save_state(checkpoint)
        plain = accelerator.unwrap_model(model)
        assert type(plain) is Model
        assert next(iter(accelerator.get_state_dict(model))) == "body.0.weight"
        kind = FastDDP if isinstance(model, FastDDP) else type(model)
        return kind, weights(plain)

    return outcomes(half, folder)


def test_accelerate(tmp_path):
    pytest.importorskip("accelerate")
    run(with_accelerate, tmp_path)


def with_trainer(rank, world, folder):
    as_torchrun(rank, world)
    from transformers import Trainer, TrainingArguments

    def half(zero, checkpoint, resumes):
        arguments = TrainingArguments(
            output_dir=checkpoint,
            use_cpu=True,
            max_steps=6 if resumes else 3,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            learning_rate=0.01,
            max_grad_norm=100.0,  # looked at, and left as it is
            report_to=[],
            save_strategy="steps",
            save_steps=3,
            disable_tqdm=True,
            ddp_find_unused_parameters=False,
        )
        trainer = Trainer(model=Model(), args=arguments, train_dataset=Numbers())
        with chosen(zero):
            trainer.train(f"{checkpoint}/checkpoint-3" if resumes else None)
        assert isinstance(trainer.model_wrapped, DistributedDataParallel)
        kind = FastDDP if isinstance(trainer.model_wrapped, FastDDP) else DistributedDataParallel
        return kind, weights(trainer.model)

    return outcomes(half, folder)


def test_transformers_trainer(tmp_path):
    pytest.importorskip("transformers")
    run(with_trainer, tmp_path, exact=[(0, 0), (1, 1), (None, 1)])


def with_lightning(rank, world, folder):
    as_torchrun(rank, world)
    import lightning
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment
    from lightning.pytorch.strategies import DDPStrategy

    os.environ["TORCHELASTIC_RUN_ID"] = "test"

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = Model()

        def training_step(self, batch):
            self.kind = type(self.trainer.strategy.model)
            return self.model(**batch)["loss"]

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def half(zero, checkpoint, resumes):
        path = f"{checkpoint}.ckpt"
        options = {"process_group_backend": "gloo", "bucket_cap_mb": 1}
        if zero is None:
            strategy = DDPStrategy(**options)
        else:
            strategy = integrations.FastDDPStrategy(zero=zero, **options)
        module = Module()
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=world,
            strategy=strategy,
            plugins=[TorchElasticEnvironment()],
            max_steps=6 if resumes else 3,
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            accumulate_grad_batches=2,
            gradient_clip_val=1.0,
        )
        loader = DataLoader(Numbers(), batch_size=4)
        trainer.fit(module, loader, ckpt_path=path if resumes else None)
        trainer.save_checkpoint(path)
        return module.kind, weights(module.model)

    return outcomes(half, folder)


def test_lightning(tmp_path):
    pytest.importorskip("lightning")
    run(with_lightning, tmp_path)
    strategy = integrations.FastDDPStrategy
    assert pickle.loads(pickle.dumps(strategy)) is strategy


def manual_optimization(rank, world, options):
    """Return the weights with torch's DDP, and with FastDDP and these options."""
    as_torchrun(rank, world)
    import lightning
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment
    from lightning.pytorch.strategies import DDPStrategy

    os.environ["TORCHELASTIC_RUN_ID"] = "test"

    class Adversaries(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            torch.manual_seed(0)
            self.parts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

        def training_step(self, batch):
            for index, optimizer in enumerate(self.optimizers()):
                self.toggle_optimizer(optimizer)
                loss = self.parts[1](torch.tanh(self.parts[0](batch["x"]))).square().mean()
                optimizer.zero_grad()
                self.manual_backward(loss if index == 0 else -loss)
                optimizer.step()
                self.untoggle_optimizer(optimizer)

        def configure_optimizers(self):
            return [torch.optim.Adam(part.parameters(), lr=0.01) for part in self.parts]

    class Together(Adversaries):
        def training_step(self, batch):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            output = self.parts[1](torch.tanh(self.parts[0](batch["x"])))
            self.manual_backward((output - batch["labels"]).square().mean())
            optimizer.step()

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=0.01)

    def trained(strategy):
        module = Together() if "static_graph" in options else Adversaries()
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=world,
            strategy=strategy,
            plugins=[TorchElasticEnvironment()],
            max_steps=8,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, DataLoader(Numbers(), batch_size=4))
        return weights(module)

    own = {name: value for name, value in options.items() if name in ("zero", "wire")}
    common = {name: value for name, value in options.items() if name not in own}
    common["process_group_backend"] = "gloo"
    fast = trained(integrations.FastDDPStrategy(**common, **own))
    return trained(DDPStrategy(**{"find_unused_parameters": True, **common})), fast


@pytest.mark.parametrize(
    "options",
    [
        {"zero": 0},
        {"zero": 0, "find_unused_parameters": True},
        {"zero": 1},
        {"zero": 2},
        {"zero": 1, "static_graph": True, "find_unused_parameters": False},
    ],
    ids=str,
)
def test_lightnings_manual_optimization(options):
    pytest.importorskip("lightning")
    for expected, fast in run_ranks(manual_optimization, 2, options, timeout=TIMEOUT):
        assert close(fast, expected)


def trigger_sync(rank, world, zero):
    as_torchrun(rank, world)
    from accelerate import Accelerator

    found = []
    for kind in (None, zero):
        accelerator = Accelerator(cpu=True)
        model = nn.Linear(8, 1)
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(0.5)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        with chosen(kind):
            model, optimizer = accelerator.prepare(model, optimizer)
        generator = torch.Generator().manual_seed(rank)
        for _ in range(3):
            with accelerator.no_sync(model):
                losses = [model(torch.randn(4, 8, generator=generator)).mean() for _ in range(2)]
            accelerator.backward(losses[0])
            with accelerator.trigger_sync_in_backward(model):
                accelerator.backward(losses[1])
            optimizer.step()
            optimizer.zero_grad()
        found.append(weights(model))
    return found


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_accelerate_triggers_a_sync(zero):
    pytest.importorskip("accelerate")
    for expected, fast in run_ranks(trigger_sync, 2, zero, timeout=TIMEOUT):
        assert close(fast, expected)


# --- means over tokens, which these libraries add up over the ranks by an all-reduce of their own


class Sequences(Dataset):
    """Sequences, most of whose tokens count in every second batch alone."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        labels = torch.randn(6, generator=generator)
        labels[torch.rand(6, generator=generator) < (0.1 if index // 4 % 2 else 0.8)] = -100
        return {"x": torch.randn(6, 8, generator=generator), "labels": labels}


class Tokens(nn.Module):
    """Model as Transformers has them: its loss is a sum over tokens, divided by their number."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, x, labels, num_items_in_batch=None, **kwargs):
        counts = labels != -100
        lost = (self.body(x).squeeze(-1) - labels)[counts].square().sum()
        return {"loss": lost / (counts.sum() if num_items_in_batch is None else num_items_in_batch)}


def tokens_of(batch):
    return (batch["labels"] != -100).sum()


def summed(tokens):
    tokens = tokens.clone()
    torch.distributed.all_reduce(tokens)
    return tokens


def accelerate_by_tokens(rank, world):
    as_torchrun(rank, world)
    from accelerate import Accelerator

    def trained(zero):
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        model = Tokens()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with chosen(zero):
            model, optimizer, loader = accelerator.prepare(
                model, optimizer, DataLoader(Sequences(), batch_size=4)
            )
        batches = list(loader)
        for first in range(0, len(batches), 2):
            micros = batches[first : first + 2]
            if zero is None:
                total = summed(sum(map(tokens_of, micros)))
            for i, batch in enumerate(micros):
                with contextlib.nullcontext() if i else accelerator.no_sync(model):
                    if zero is None:
                        loss = 2 * world * model(**batch, num_items_in_batch=total)["loss"]
                    else:
                        loss = model(**batch, num_items_in_batch=1)["loss"]
                        model.add_weight(tokens_of(batch) / accelerator.gradient_accumulation_steps)
                    accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        return weights(model)

    return [trained(None), trained(0), trained(1)]


def trainer_by_tokens(rank, world, folder):
    as_torchrun(rank, world)
    from transformers import Trainer, TrainingArguments

    class Weighted(Trainer):
        def compute_loss(self, model, inputs, *args, num_items_in_batch=None, **kwargs):
            model.add_weight(tokens_of(inputs))
            return super().compute_loss(model, inputs, *args, num_items_in_batch=1, **kwargs)

    def trained(zero):
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            max_steps=4,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            average_tokens_across_devices=zero is None,
            optim="sgd",
            learning_rate=0.1,
            max_grad_norm=0,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            ddp_find_unused_parameters=False,
        )
        kind = Trainer if zero is None else Weighted
        trainer = kind(model=Tokens(), args=arguments, train_dataset=Sequences())
        with chosen(zero):
            trainer.train()
        return weights(trainer.model)

    return [trained(None), trained(0), trained(1)]


def lightning_by_tokens(rank, world):
    as_torchrun(rank, world)
    import lightning
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment
    from lightning.pytorch.strategies import DDPStrategy

    os.environ["TORCHELASTIC_RUN_ID"] = "test"

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = Tokens()

        def training_step(self, batch):
            model, tokens = self.trainer.strategy.model, tokens_of(batch)
            if isinstance(model, FastDDP):
                model.add_weight(tokens / self.trainer.accumulate_grad_batches)
                return self.model(**batch, num_items_in_batch=1)["loss"]
            return world * self.model(**batch, num_items_in_batch=summed(tokens))["loss"]

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def trained(strategy, accumulate):
        module = Module()
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=world,
            strategy=strategy,
            plugins=[TorchElasticEnvironment()],
            max_steps=4,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            accumulate_grad_batches=accumulate,
        )
        trainer.fit(module, DataLoader(Sequences(), batch_size=4 * (3 - accumulate)))
        return weights(module.model)

    options = {"process_group_backend": "gloo"}
    fast = integrations.FastDDPStrategy
    found = [trained(DDPStrategy(**options), 1)]
    found += [trained(fast(zero=zero, **options), 1) for zero in (0, 1)]
    return [*found, trained(fast(**options), 2)]


def compare_means(results):
    for wanted, *others in results:
        assert not close(wanted, weights(Tokens()))
        for found in others:
            assert close(found, wanted)


def test_accelerates_mean_over_tokens():
    pytest.importorskip("accelerate")
    compare_means(run_ranks(accelerate_by_tokens, 2, timeout=TIMEOUT))


def test_num_items_in_batch_of_transformers(tmp_path):
    pytest.importorskip("transformers")
    compare_means(run_ranks(trainer_by_tokens, 2, str(tmp_path), timeout=TIMEOUT))


def test_lightnings_mean_over_tokens():
    pytest.importorskip("lightning")
    compare_means(run_ranks(lightning_by_tokens, 2, timeout=TIMEOUT))


def replaced(rank, world):
    with integrations.in_place_of_ddp(wire="bf16") as kind:
        assert nn.parallel.DistributedDataParallel is kind
        model = nn.parallel.DistributedDataParallel(nn.Linear(2, 1))
        assert isinstance(model, nn.parallel.DistributedDataParallel)
    assert nn.parallel.DistributedDataParallel is DistributedDataParallel
    assert isinstance(model, FastDDP)
    return model._policy.wire.format


def test_only_inside_the_context():
    assert run_ranks(replaced, 2) == ["bf16"] * 2
    with pytest.raises(ZeroDivisionError), integrations.in_place_of_ddp():
        raise ZeroDivisionError
    assert nn.parallel.DistributedDataParallel is DistributedDataParallel


def test_what_is_not_there_is_named():
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        _ = integrations.Nothing
