"""Training libraries with FastDDP, against the same libraries with torch's DDP.

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
    """What a Trainer expects: the loss comes with the output."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, x, labels):
        predicted = self.body(x)
        return {"loss": (predicted - labels).square().mean(), "predicted": predicted}


def as_torchrun(rank, world):
    """What the libraries read to find out that they run distributed."""
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ.update({name: str(value) for name, value in places.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500", ACCELERATE_USE_CPU="1")
    os.environ.update(HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES="", NODE_RANK="0")


def chosen(kind, **options):
    return integrations.in_place_of_ddp(**options) if kind == "fast" else contextlib.nullcontext()


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


def agree(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def moved(found):
    return not agree(found, weights(Model()))


def with_accelerate(rank, world):
    as_torchrun(rank, world)
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs

    found, kinds = [], []
    for kind in ("fast", "torch"):
        handler = DistributedDataParallelKwargs(bucket_cap_mb=1)
        accelerator = Accelerator(
            cpu=True, gradient_accumulation_steps=2, kwargs_handlers=[handler]
        )
        model = Model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        loader = DataLoader(Numbers(), batch_size=4)
        with chosen(kind, gradient_as_bucket_view=False):
            model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch)["loss"])
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        kinds.append(isinstance(model, FastDDP))
        plain = accelerator.unwrap_model(model)
        found.append(weights(plain))
        assert type(plain) is Model
        assert next(iter(accelerator.get_state_dict(model))) == "body.0.weight"
    return kinds, agree(*found), moved(found[0])


def test_accelerate():
    pytest.importorskip("accelerate")
    assert run_ranks(with_accelerate, 2, timeout=TIMEOUT) == [([True, False], True, True)] * 2


def with_trainer(rank, world, folder):
    as_torchrun(rank, world)
    from transformers import Trainer, TrainingArguments

    found, kinds = [], []
    for kind in ("fast", "torch"):
        arguments = TrainingArguments(
            output_dir=f"{folder}/{kind}",
            use_cpu=True,
            max_steps=6,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            learning_rate=0.01,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            ddp_find_unused_parameters=False,
        )
        trainer = Trainer(model=Model(), args=arguments, train_dataset=Numbers())
        with chosen(kind):
            trainer.train()
        kinds.append(isinstance(trainer.model_wrapped, FastDDP))
        assert isinstance(trainer.model_wrapped, DistributedDataParallel)
        found.append(weights(trainer.model))
    return kinds, agree(*found), moved(found[0])


def test_transformers_trainer(tmp_path):
    pytest.importorskip("transformers")
    results = run_ranks(with_trainer, 2, str(tmp_path), timeout=TIMEOUT)
    assert results == [([True, False], True, True)] * 2


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
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    found, kinds = [], []
    for strategy in (integrations.FastDDPStrategy, DDPStrategy):
        module = Module()
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=world,
            strategy=strategy(process_group_backend="gloo", bucket_cap_mb=1),
            plugins=[TorchElasticEnvironment()],
            max_steps=6,
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            accumulate_grad_batches=2,
        )
        trainer.fit(module, DataLoader(Numbers(), batch_size=4))
        kinds.append(module.kind is FastDDP)
        found.append(weights(module.model))
    return kinds, agree(*found), moved(found[0])


def test_lightning(tmp_path):
    pytest.importorskip("lightning")
    results = run_ranks(with_lightning, 2, str(tmp_path), timeout=TIMEOUT)
    assert results == [([True, False], True, True)] * 2
    strategy = integrations.FastDDPStrategy
    assert pickle.loads(pickle.dumps(strategy)) is strategy


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
