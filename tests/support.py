"""What tests share: tiny random models, data, trainers and their oracles, all offline."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything that reads it is imported

import atexit
import multiprocessing
import runpy
import socket
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from per_sample_oracle import logits_of, random_batch, summed_loss
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import (
    DeiTConfig,
    DeiTForImageClassification,
    Dinov2Config,
    Dinov2ForImageClassification,
    PreTrainedModel,
    ViTConfig,
    ViTForImageClassification,
)

from hf_dpmuon.arguments import DPTrainingArguments
from hf_dpmuon.data import ImageFormat
from hf_dpmuon.grad_sample import PerSampleEngine, verify_per_sample_gradients
from hf_dpmuon.ledger import PrivacyLedger
from hf_dpmuon.models import LoadedModel
from hf_dpmuon.trainer import DPTrainer

ROOT = Path(__file__).parents[1]
NUM_CLASSES = 3


def _hf(config: type, model: type[PreTrainedModel], *, seed: int, **settings: object) -> nn.Module:
    torch.manual_seed(seed)
    return _randomise(
        model(
            config(
                **{
                    "hidden_size": 16,
                    "num_hidden_layers": 2,
                    "num_attention_heads": 2,
                    "intermediate_size": 32,
                    "image_size": 8,
                    "patch_size": 4,
                    "num_labels": NUM_CLASSES,
                    **settings,
                }
            )
        )
    )


def _randomise(model: nn.Module) -> nn.Module:
    """Move tokens, scales and biases off the zeros and ones at which faults would hide."""
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model


def tiny_vit(
    *, image_size: int = 8, num_channels: int = 3, dropout: float = 0.0, seed: int = 0
) -> nn.Module:
    """HF ViT of 2 blocks and width 16, with 4-pixel patches."""
    return _hf(
        ViTConfig,
        ViTForImageClassification,
        seed=seed,
        image_size=image_size,
        num_channels=num_channels,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )


def tiny_deit(
    *, image_size: int = 8, num_channels: int = 3, dropout: float = 0.0, seed: int = 0
) -> nn.Module:
    """HF DeiT, which adds a distillation token."""
    return _hf(
        DeiTConfig,
        DeiTForImageClassification,
        seed=seed,
        image_size=image_size,
        num_channels=num_channels,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )


def tiny_dinov2(
    *,
    image_size: int = 8,
    num_channels: int = 3,
    dropout: float = 0.0,
    drop_path: float = 0.0,
    use_mask_token: bool = False,
    seed: int = 0,
) -> nn.Module:
    """HF DINOv2, which adds LayerScale and, if asked, a mask token that nothing reads."""
    return _hf(
        Dinov2Config,
        Dinov2ForImageClassification,
        seed=seed,
        image_size=image_size,
        num_channels=num_channels,
        mlp_ratio=2,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        drop_path_rate=drop_path,
        use_mask_token=use_mask_token,
    )


def tiny_timm_vit(
    *,
    image_size: int = 8,
    num_channels: int = 3,
    dropout: float = 0.0,
    drop_path: float = 0.0,
    seed: int = 0,
) -> nn.Module:
    """ViT of timm, which adds register tokens, LayerScale and a fused qkv."""
    import timm

    torch.manual_seed(seed)
    return _randomise(
        timm.create_model(
            "vit_tiny_patch16_224",
            img_size=image_size,
            patch_size=4,
            in_chans=num_channels,
            embed_dim=16,
            depth=2,
            num_heads=2,
            mlp_ratio=2,
            num_classes=NUM_CLASSES,
            init_values=0.5,
            reg_tokens=2,
            drop_rate=dropout,
            proj_drop_rate=dropout,
            pos_drop_rate=dropout,
            attn_drop_rate=dropout,
            drop_path_rate=drop_path,
        )
    )


TINY_MODELS: dict[str, Callable[..., nn.Module]] = {
    "vit": tiny_vit,
    "deit": tiny_deit,
    "dinov2": tiny_dinov2,
    "timm_vit": tiny_timm_vit,
}


def fixed_draw(
    num_units: int, *, seed: int, step: int, sample_rate: float
) -> tuple[np.ndarray, np.random.Generator]:
    """The units of a step of a run with ``noise_seed``, and the generator that drew them."""
    from hf_dpmuon.randomness import keyed_generator
    from hf_dpmuon.sampling import PoissonSampler

    generator = keyed_generator(seed.to_bytes(32, "big"), b"sampling", str(step).encode())
    return PoissonSampler(num_units, sample_rate=sample_rate).draw(generator), generator


def fixed_noise(
    parameter: str, shape: torch.Size, *, seed: int, step: int, sigma: float, C: float, batch: float
) -> torch.Tensor:
    """The standard normal noise of a parameter in a run with ``noise_seed``."""
    from hf_dpmuon.randomness import keyed_generator

    material = (seed.to_bytes(32, "big"), f"{step} {sigma} {C} {batch}".encode(), b"")
    generator = keyed_generator(*material, parameter.encode())
    return torch.from_numpy(generator.standard_normal(tuple(shape), dtype=np.float32))


N = 24


class Images(Dataset[dict[str, Any]]):
    """Random images of three classes; a patient's name rides along and must stay behind."""

    def __init__(self, size: int = N, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.pixels = torch.randn(size, 3, 8, 8, generator=generator)
        self.labels = torch.randint(0, NUM_CLASSES, (size,), generator=generator)

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {
            "pixel_values": self.pixels[row],
            "labels": self.labels[row],
            "patient": f"patient-{row}",
        }


def arguments(folder: Path, **settings: Any) -> DPTrainingArguments:
    defaults: dict[str, Any] = {
        "output_dir": str(folder),
        "noise_multiplier": 1.0,
        "logical_batch_size": 8,
        "per_device_train_batch_size": 4,
        "max_steps": 4,
        "learning_rate": 0.1,
        "noise_seed": 7,
        "use_cpu": True,
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_steps": 1,
    }
    if settings.get("dp_optimizer", "muon") in ("muon", "muon_s"):
        defaults["vector_learning_rate"] = 0.1
    return DPTrainingArguments(**{**defaults, **settings})


def trainer_of(folder: Path, model: nn.Module | None = None, **settings: Any) -> DPTrainer:
    kind = settings.pop("kind", DPTrainer)
    extra = {k: settings.pop(k) for k in ("optimizers", "callbacks") if k in settings}
    train_dataset = settings.pop("train_dataset") if "train_dataset" in settings else Images()
    return kind(
        tiny_vit() if model is None else model,
        arguments(folder, **settings),
        train_dataset=train_dataset,
        eval_dataset=Images(10, seed=1),
        **extra,
    )


def as_loaded(model: nn.Module) -> LoadedModel:
    """What load_model returns for a timm model."""
    return LoadedModel(
        model=model,
        image_format=ImageFormat(8, 8, 3, (0.5,) * 3, (0.5,) * 3, "bilinear"),
        processor=None,
        library="timm",
        label_names=("a", "b", "c"),
        notes=(),
    )


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def largest_difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[n] - b[n]).abs().max()) for n in a)


class Spy(DPTrainer):
    """Keeps what training_step left behind, just as the base class would see it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.releases: list[dict[str, Tensor]] = []
        self.ledger_lengths: list[int] = []

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        before = weights(self.model)
        loss = super().training_step(*args, **kwargs)
        assert largest_difference(before, weights(self.model)) == 0
        for p in self.model.parameters():
            assert p.grad_sample is None
        for holder in (*self.model.modules(), self.model_wrapped, *self.model.parameters()):
            kept = {"activations", "_current_grad_sample", "_uses", "_outputs", "_norms"}
            assert not any(vars(holder)[key] for key in vars(holder).keys() & kept)
        assert all(float(s.abs().max()) == 0 for s in self._step.mechanism._sums.values())
        self.releases.append({n: p.grad.clone() for n, p in self.model.named_parameters()})
        self.ledger_lengths.append(self.count_records())
        return loss

    def count_records(self) -> int:
        return len(PrivacyLedger.load(self.privacy_run.folder / "privacy_ledger.jsonl"))


def checkpointed(folder: Path, **settings: Any) -> Path:
    trainer_of(folder, save_strategy="steps", save_steps=2, **settings).train()
    return folder / "checkpoint-2"


class Recording(Images):
    """Keeps which rows were asked for."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.asked: list[int] = []

    def __getitem__(self, row: int) -> dict[str, Any]:
        self.asked.append(row)
        return super().__getitem__(row)


def keys_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.secrets")


def fails_to_train(trainer: DPTrainer, message: str) -> None:
    """It refuses, and nothing was written or spent."""
    with pytest.raises(ValueError, match=message):
        trainer.train()
    assert trainer.ledger is None
    assert not Path(trainer.args.output_dir, "privacy_ledger.jsonl").exists()


WATCHDOG = 120  # seconds: a collective that not all processes reach would wait for ever


def in_processes(world_size: int, work: Callable[[int], Any]) -> list[Any]:
    """Fork processes that form a group over gloo; return what ``work`` returned in each."""
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def child(rank: int) -> None:
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(world_size),
            LOCAL_WORLD_SIZE=str(world_size),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            ACCELERATE_USE_CPU="true",
        )
        torch.set_num_threads(1)
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        try:
            results.put((rank, work(rank), None))
        except BaseException:
            results.put((rank, None, traceback.format_exc()))
        finally:
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()

    processes = [context.Process(target=child, args=(rank,)) for rank in range(world_size)]
    for process in processes:
        process.start()
    try:
        collected = [results.get(timeout=WATCHDOG) for _ in processes]
    finally:
        for process in processes:
            process.join(timeout=10)
            process.kill()
    for _, _, error in collected:
        assert error is None, error
    return [result for _, result, _ in sorted(collected, key=lambda item: item[0])]


def forked(
    work: Callable[[], object], environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run what an interpreter of its own would: only the imports are those of this process.

    It has its own streams, variables, warnings, exit functions and exit code.
    """
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:

        def child() -> None:
            code = 1
            try:
                for number, (name, stream) in enumerate({"stdout": out, "stderr": err}.items(), 1):
                    os.dup2(stream.fileno(), number)
                    setattr(sys, name, os.fdopen(number, "w", closefd=False))
                if environment is not None:
                    os.environ.clear()
                    os.environ.update(environment)
                os.chdir(ROOT)
                atexit._clear()
                warnings.resetwarnings()
                warnings.simplefilter("ignore")
                torch.set_num_threads(1)
                AcceleratorState._reset_state(reset_partial_state=True)
                GradientState._reset_state()
                try:
                    work()
                    code = 0
                except SystemExit as end:
                    code = end.code if isinstance(end.code, int) else int(end.code is not None)
                except BaseException:
                    traceback.print_exc()
                atexit._run_exitfuncs()
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(code)

        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        process.join(timeout=WATCHDOG)
        process.kill()
        process.join()
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess([], process.exitcode or 0, out.read(), err.read())


def script(
    *options: str, path: str = "scripts/finetune_vit.py", **settings: Any
) -> subprocess.CompletedProcess[str]:
    """Run the script with these options, ``forked``."""

    def work() -> None:
        sys.argv = [path, *options]
        runpy.run_path(path, run_name="__main__")

    return forked(work, **settings)


class Noise(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        return {
            "pixel_values": torch.randn(3, 8, 8, generator=generator),
            "labels": torch.tensor(index % 3),
        }


IMAGES, LABELS = random_batch(5)


def verify(engine: PerSampleEngine, *, images: Tensor = IMAGES) -> None:
    def loss_of(model: nn.Module, rows: Sequence[int]) -> tuple[Tensor, int]:
        selected = list(rows)
        return summed_loss(logits_of(model(images[selected])), LABELS[selected]), len(selected)

    verify_per_sample_gradients(engine, loss_of)


class Middle(nn.Module):
    """A classifier with a layer to be tested between two sound ones."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(12, 12)
        self.layer = layer
        self.head = nn.Linear(12, 3)

    def forward(self, images: Tensor) -> Tensor:
        x = self.first(images.mean(-1).flatten(1)[:, :12])
        return self.head(torch.tanh(self.layer(x)))


class Lambda(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor], *, in_eval: bool = False) -> None:
        super().__init__()
        self.function = function
        self.in_eval = in_eval

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x) if self.training or self.in_eval else x
