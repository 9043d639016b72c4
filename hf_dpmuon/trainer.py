"""Runs the private flow inside Hugging Face's training loop.

Receives a checked model, data and arguments; drives sampling, per-sample gradients, mechanism,
ledger and optimizer; returns what ``Trainer`` returns, less what is not private.

The privacy boundary is the end of ``DPTrainer.training_step``: when it returns, every ``p.grad``
holds the private mean gradient, the ledger holds its record, and nothing raw is left on the model.
Whatever the base class does afterwards is post-processing.
"""

from __future__ import annotations

import logging
import math
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import DynamoBackend, broadcast, gather_object
from huggingface_hub import CommitInfo
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset
from transformers import (
    EarlyStoppingCallback,
    EvalPrediction,
    PreTrainedModel,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainerState,
)
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import (
    HubStrategy,
    SchedulerType,
    TrainOutput,
    get_last_checkpoint,
    rotate_checkpoints,
)
from transformers.utils import SAFE_WEIGHTS_NAME

from hf_dpmuon import hub, model_card
from hf_dpmuon.accounting import steps_per_epoch
from hf_dpmuon.arguments import DPTrainingArguments
from hf_dpmuon.batches import LogicalBatches, RowWise, SeededRows, seeded_globals
from hf_dpmuon.callbacks import (
    BudgetSpentError,
    Interrupt,
    PrivacyProgressCallback,
    StopCallback,
)
from hf_dpmuon.data import ImageExamples, RepeatedUnit, collate
from hf_dpmuon.diagnostics import signal_to_noise
from hf_dpmuon.filters import moved_to
from hf_dpmuon.grad_sample import (
    ENGINES,
    PerSampleEngine,
    free_bytes,
    peak_bytes,
    verify_per_sample_gradients,
    verify_row_losses,
)
from hf_dpmuon.ledger import PrivacyLedger
from hf_dpmuon.mechanism import GaussianMechanism
from hf_dpmuon.metrics import build_metrics, plot_confusion
from hf_dpmuon.models import LoadedModel, save_model, validate_model
from hf_dpmuon.optim import KnownNoise, create_optimizer, routing_table
from hf_dpmuon.run import PrivacyPlan, PrivateRun, write_json
from hf_dpmuon.sampling import (
    LogicalBatch,
    LogicalBatchLoader,
    PoissonSampler,
    PrivacyUnits,
    keyed_generator,
)

__all__ = ["DPTrainer"]

logger = logging.getLogger(__name__)

FILTER_FILE = "gradient_filter.pt"
STAGING = ".incomplete-checkpoint"
CONFUSION_FILE = "confusion.png"
MOST_ROWS_TRIED = 256  # when a loss is verified
# Of what grad_sample_mode="auto" measures: kernels take storage of their own.
MEMORY_MARGIN = 1.2
# Sums, noise, gradients, and two of the optimizer, each as large as all trainable parameters.
LASTING_COPIES = 5
# Of the Hub, timm or this package.
PUBLIC_NAME = re.compile(r"(builtin:|timm/)?\w[\w.-]*(/\w[\w.-]*)?")
COMPUTE_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# As the paper names its methods: DP-SGD, DOPPLER-Muon.
FILTER_NAMES = {"none": "DP", "doppler": "DOPPLER", "disk": "DiSK"}
OPTIMIZER_NAMES = {"sgd": "SGD", "adam": "Adam", "muon": "Muon", "muon_s": "Muon-S"}


class DPTrainer(Trainer):
    """``Trainer`` whose gradients are private before anything else sees them.

    Args:
        model: What ``load_model`` returned (Hugging Face or timm), or a ``PreTrainedModel``; it
            stays plain, without wrapper or prefix.
        args: Checked arguments.
        train_dataset: The private examples, map-style. Rows are dicts with ``pixel_values`` and
            ``labels``; several labels of one row are floats, NaN where one is missing.
        eval_dataset: Examples for evaluation; not covered by the guarantee.
        data_collator: Collates rows without mixing them; only images and labels reach the model.
        processing_class: The image processor to save beside the model.
        compute_metrics: Evaluation metrics; by default those of ``metrics.build_metrics``.
        callbacks: Further callbacks.
        optimizers: An optimizer over exactly the trainable parameters, and a scheduler.
        units: Which rows belong to each privacy unit, a patient say; each row is one if None.
        max_examples_per_unit: Most rows of a drawn unit in one step, drawn anew in each.
        repeated_unit: Ids that several rows share although each row is a unit of its own; the
            report then says what the guarantee is worth for the largest group.
        class_weights: Public weights of the classes in the loss; of the positive examples of each
            label where there are several.
        base_model: Name of the pretrained model, for the card; paths are left out.
        dataset_name: Name of the data set, for the card; paths are left out.

    Raises:
        ValueError: If the model, data or arguments cannot be trained privately.

    Guarantees:
        (epsilon, delta)-differential privacy of everything that leaves ``training_step``, for
        adding or removing one privacy unit (all its rows) of ``train_dataset``, with epsilon as
        the ledger composes it.
    """

    args: DPTrainingArguments
    model: nn.Module
    train_dataset: Dataset[Any]
    hub_model_id: str | None  # type: ignore[assignment]

    def __init__(
        self,
        model: LoadedModel | PreTrainedModel,
        args: DPTrainingArguments,
        *,
        train_dataset: Dataset[Any],
        eval_dataset: Dataset[Any] | None = None,
        data_collator: Callable[[list[Any]], dict[str, Tensor]] | None = None,
        processing_class: Any = None,
        compute_metrics: Callable[[EvalPrediction], dict[str, float]] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, Any] = (None, None),
        units: PrivacyUnits | None = None,
        max_examples_per_unit: int = 8,
        repeated_unit: RepeatedUnit | None = None,
        class_weights: Sequence[float] | None = None,
        base_model: str | None = None,
        dataset_name: str | None = None,
    ) -> None:
        for own, used in (
            (DPTrainer.get_train_dataloader, type(self).get_train_dataloader),
            (DPTrainer._get_train_sampler, type(self)._get_train_sampler),
            (DPTrainer.get_batch_samples, type(self).get_batch_samples),
        ):
            if own is not used:
                raise ValueError(
                    f"{type(self).__name__}.{used.__name__} replaces the sampling that the "
                    "accountant assumes; remove it, and weight classes in the loss instead."
                )
        if not hasattr(train_dataset, "__len__") or not hasattr(train_dataset, "__getitem__"):
            raise ValueError(
                "train_dataset must be map-style with a length: the number of privacy units must "
                "be known; load it without streaming."
            )
        if len(train_dataset) == 0:
            raise ValueError("train_dataset is empty; check the split's name and filters.")
        if isinstance(model, LoadedModel):
            self._loaded: LoadedModel | None = model
            module, processing_class = model.model, model.processor
        elif isinstance(model, PreTrainedModel):
            self._loaded, module = None, model
        else:
            raise ValueError(
                f"model of type {type(model).__name__} is not known how to be saved; load it with "
                "load_model('timm/<name>', ...) and pass what that returns."
            )
        held_out = eval_dataset.values() if isinstance(eval_dataset, dict) else [eval_dataset]
        if any(_share_rows(one, train_dataset) for one in held_out):
            raise ValueError(
                "eval_dataset holds rows of train_dataset, whose un-noised metrics would be "
                "published with the model; evaluate on data that is not trained on."
            )
        if repeated_unit is not None and units is not None:
            raise ValueError("units and repeated_unit are both set; give the one that applies.")
        validate_model(module)
        _check_units(units, max_examples_per_unit, num_rows=len(train_dataset), args=args)
        self.units = units
        self.max_examples_per_unit = max_examples_per_unit
        self.multi_label = (
            model.multi_label
            if isinstance(model, LoadedModel)
            else model.config.problem_type == "multi_label_classification"
        )
        self.run = PrivateRun(
            args,
            num_units=len(train_dataset) if units is None else len(units),
            privacy_unit="image" if units is None else units.name,
            max_examples_per_unit=None if units is None else max_examples_per_unit,
            partition=b"" if units is None else _partition_bytes(units),
            repeated_unit=repeated_unit,
        )
        self.base_model = _public_name(base_model)
        self.dataset_name = _public_name(dataset_name)
        self.eval_metrics: dict[str, float] = {}
        self._last_prediction: EvalPrediction | None = None
        self._mechanism: GaussianMechanism | None = None
        self._batches: LogicalBatchLoader | None = None
        self._staging = False
        self._interrupt = Interrupt()
        self.interrupted = False
        super().__init__(
            model=module,
            args=args,
            data_collator=RowWise(data_collator or collate),
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            compute_metrics=self._compute_metrics,
            callbacks=callbacks,
            optimizers=optimizers,
        )
        self._check_callbacks()
        if self.accelerator.state.dynamo_plugin.backend != DynamoBackend.NO:
            raise ValueError(
                "the launcher's dynamo_backend compiles the model, which bypasses the engine of "
                "per-sample gradients; launch with --dynamo_backend no."
            )
        if torch.get_float32_matmul_precision() != "highest":
            raise ValueError(
                f"float32_matmul_precision={torch.get_float32_matmul_precision()!r} rounds norms "
                "and sums, which loosens the clipping bound; call "
                "torch.set_float32_matmul_precision('highest')."
            )
        self._metrics_of = compute_metrics or build_metrics(
            self._label_names(), multi_label=self.multi_label
        )
        self.label_names = ["labels"]
        self._class_weights = self._checked_class_weights(class_weights)
        self._filtered = [p for p in self.model.parameters() if p.requires_grad]
        self._filter = args.build_filter(self._filtered)
        if self.optimizer is not None:
            self._check_optimizer(self.optimizer)
        if self.pop_callback(ProgressCallback) is not None:
            self.add_callback(PrivacyProgressCallback(self.run.epsilon))
        self.add_callback(StopCallback(self.run.may_take, lambda: self.interrupted))

    # ---- what the base class's loop asks for ----

    @property
    def plan(self) -> PrivacyPlan:
        """What the accountant assumes of this run."""
        return self.run.plan

    @property
    def ledger(self) -> PrivacyLedger | None:
        """The record of all noise draws; None before training, and but in the main process."""
        return self.run.ledger

    def epsilon(self) -> float:
        """Epsilon spent so far, from the ledger."""
        return self.run.epsilon()

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Logical batches, each a Poisson draw that yields its physical batches when iterated."""
        self._batches = LogicalBatchLoader(
            SeededRows(self.train_dataset),
            sampler=PoissonSampler(
                self.plan.num_units,
                sample_rate=self.plan.sample_rate,
                generator=self.run.sampling_generator,
            ),
            physical_batch_size=self.args.per_device_train_batch_size,
            collate_fn=self.data_collator,
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory and self.args.device.type == "cuda",
            num_batches=steps_per_epoch(self.plan.sample_rate),
            rows_of_unit=None if self.units is None else self.units.rows_of_unit,
            max_rows_per_unit=self.max_examples_per_unit,
            augmentations=self.args.augmentation_multiplicity,
            rank=self.args.process_index,
            world_size=self.args.world_size,
        )
        return DataLoader(
            LogicalBatches(self._batches),
            batch_size=1,
            collate_fn=_only,
            generator=torch.Generator(),  # else each epoch takes a seed from the global generator
        )

    def num_examples(self, dataloader: DataLoader[Any]) -> int:
        """Number of privacy units for training data, of examples otherwise."""
        if isinstance(dataloader.dataset, LogicalBatches):
            return self.plan.num_units
        count: int = super().num_examples(dataloader)
        return count

    def get_batch_samples(
        self, epoch_iterator: Iterator[LogicalBatch], num_batches: int, device: torch.device
    ) -> tuple[list[LogicalBatch], None]:
        """The next logical batch. Its items are not counted: their number is private."""
        assert num_batches == 1, "gradient_accumulation_steps is 1"
        return [next(epoch_iterator)], None

    def floating_point_ops(self, inputs: Any) -> int:
        """Zero: the true count would tell the private batch size."""
        return 0

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Build the optimizer of ``dp_optimizer`` and print which rule moves what."""
        if self.optimizer is None:
            assert self.args.learning_rate is not None
            assert self.args.sgd_momentum is not None
            self.optimizer = create_optimizer(
                self.model,
                dp_optimizer=self.args.dp_optimizer,
                learning_rate=self.args.learning_rate,
                vector_learning_rate=self.args.vector_learning_rate,
                weight_decay=self.args.weight_decay,
                sgd_momentum=self.args.sgd_momentum,
                orthogonalize_head=self.args.orthogonalize_head,
                orthogonalize_patch_embedding=self.args.orthogonalize_patch_embedding,
                spectral_map=self.args.spectral_map,
                ns_steps=self.args.ns_steps,
                ns_coefficients=self.args.ns_coefficients,
                ns_bf16=self.args.ns_bf16,
                adjust_lr=self.args.adjust_lr,
                muon_momentum=self.args.muon_momentum,
                adam_beta1=self.args.adam_beta1,
                adam_beta2=self.args.adam_beta2,
                adam_epsilon=self.args.adam_epsilon,
                noise=self._known_noise,
                correct_for_noise=self.args.correct_for_noise,
            )
            logger.info("Routing of parameters:\n%s", routing_table(self.model, self.optimizer))
        return self.optimizer

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> Any:
        """The schedule of the arguments; a warm-up starts at its second point, not at zero.

        At a learning rate of zero a step would spend privacy and move nothing.
        """
        if self.lr_scheduler is not None or self.args.get_warmup_steps(num_training_steps) == 0:
            return super().create_scheduler(num_training_steps, optimizer)
        scheduler = super().create_scheduler(num_training_steps + 1, optimizer)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
            scheduler.step()
        return scheduler

    def _check_callbacks(self) -> None:
        stops = any(isinstance(c, EarlyStoppingCallback) for c in self.callback_handler.callbacks)
        if stops and not self.args.public_eval_split:
            raise ValueError(
                "EarlyStoppingCallback lets the evaluation split choose the released model at no "
                "counted cost; set public_eval_split=True if that split is public data."
            )

    def _checked_class_weights(self, weights: Sequence[float] | None) -> Tensor | None:
        if self.multi_label and self.args.label_smoothing_factor != 0:
            raise ValueError(
                f"label_smoothing_factor={self.args.label_smoothing_factor} is for one label per "
                "image; leave it 0."
            )
        if weights is None:
            return None
        count = len(self._label_names())
        if len(weights) != count or not all(0 < weight < math.inf for weight in weights):
            raise ValueError(
                f"class_weights={list(weights)} must be {count} finite numbers > 0, one for each "
                "class in the order of the class names."
            )
        return torch.tensor(weights, dtype=torch.float32)

    @property
    def _known_noise(self) -> KnownNoise:
        """What the accountant's plan fixes of the noise in the gradients of the optimizer."""
        expected_batch_size = self.plan.sample_rate * self.plan.num_units
        std = self.plan.noise_multiplier * self.args.per_sample_max_grad_norm / expected_batch_size
        return KnownNoise(std, self._filter.response)

    def _check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        names = {id(p): name for name, p in self.model.named_parameters() if p.requires_grad}
        held = [id(p) for group in optimizer.param_groups for p in group["params"]]
        if sorted(held) != sorted(names):
            missing = [name for key, name in names.items() if key not in held]
            frozen = [n for n, p in self.model.named_parameters() if id(p) in {*held} - {*names}]
            others = len(held) - len(names) + len(missing) - len(frozen)
            raise ValueError(
                "the optimizer must hold each trainable parameter of the model exactly once; "
                f"missing: {', '.join(missing) or 'none'}; not trainable: "
                f"{', '.join(frozen) or 'none'}; not of this model or repeated: {others}. Build it "
                "after the model is final."
            )

    def _wrap_model(
        self, model: nn.Module, training: bool = True, dataloader: DataLoader[Any] | None = None
    ) -> nn.Module:
        if not training or isinstance(model, PerSampleEngine):
            return model
        # No wrapper of torch's: it would add up gradients that are not private.
        prepared = self.accelerator.prepare_model(model, evaluation_mode=True)
        for tensor in prepared.state_dict().values():
            broadcast(tensor)
        prepared.train()
        engine = self._build_engine(prepared)
        self._mechanism = GaussianMechanism(
            engine,
            noise_multiplier=self.plan.noise_multiplier,
            max_grad_norm=self.args.per_sample_max_grad_norm,
            sample_rate=self.plan.sample_rate,
            num_units=self.plan.num_units,
            noise_key=self.run.noise_key,
            fixed_noise=self.args.noise_seed is not None,
            clipping=self.args.clipping,  # type: ignore[arg-type]
            loss_scale=self._loss_scale,
        )
        return engine

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None
    ) -> tuple[nn.Module, Any]:
        prepared: tuple[nn.Module, Any] = super()._prepare_for_training(  # type: ignore[no-untyped-call]
            max_steps, train_dataloader, resume_from_checkpoint
        )
        assert self.optimizer is not None
        self._check_optimizer(self.optimizer)
        # Only now: whatever refuses to train has refused, and nothing was written.
        self.run.open()
        assert self._mechanism is not None
        self._mechanism.noise_key = self.run.noise_key
        return prepared

    # ---- the private step ----

    def training_step(  # type: ignore[override]  # a logical batch, not a dict
        self, model: nn.Module, inputs: LogicalBatch, num_items_in_batch: Any = None
    ) -> Tensor:
        """Replace the gradient of one logical batch by its private release.

        Args:
            model: The engine of per-sample gradients around the plain model.
            inputs: One Poisson draw.
            num_items_in_batch: Always None.

        Returns:
            Zero, or with ``report_nonprivate_loss`` the raw mean loss.

        Guarantees:
            On return each ``p.grad`` is private, no per-sample or raw gradient is left, and the
            draw of noise is on disk in the ledger.
        """
        mechanism = self._mechanism
        assert mechanism is not None
        step = self.state.global_step + 1
        assert self.optimizer is not None
        self._check_optimizer(self.optimizer)  # a callback may have added to it
        if not self.run.may_take(step):
            raise BudgetSpentError("the privacy budget is spent")
        loss = self._sum_draw(model, mechanism, inputs)
        event = mechanism.release(step=step, votes=float(self._interrupt.requested))
        if self.run.departs(event):
            self.model.zero_grad()
            if self.run.remaining <= 0:
                raise BudgetSpentError(
                    f"step {step} differs from the interrupted run, and the budget has no draw left"
                )
            logger.warning("Step %d differs from the interrupted run: drawing afresh.", step)
            assert self._batches is not None
            fresh = self._batches.restart(self.run.draw_afresh())
            mechanism.noise_key = self.run.noise_key
            loss = self._sum_draw(model, mechanism, fresh)
            event = mechanism.release(step=step, votes=float(self._interrupt.requested))
        self.run.record(event)
        self.interrupted = mechanism.votes > 0
        smoothed = self._filter.smooth([_gradient_of(p) for p in self._filtered])
        for p, gradient in zip(self._filtered, smoothed, strict=True):
            p.grad = gradient
        return torch.tensor(loss, device=self.args.device)

    def _sum_draw(
        self, model: nn.Module, mechanism: GaussianMechanism, draw: LogicalBatch
    ) -> float:
        """Clip and sum the gradients of a draw in the mechanism; return 0, or the raw mean loss."""
        model.train()
        mechanism.begin()
        loss_sum, rows = 0.0, 0
        points = self._filter.query_points()
        for index, physical_batch in enumerate(draw):
            batch = self._prepare_inputs(physical_batch.inputs)
            labels, size = batch["labels"], len(batch["labels"])
            if not labels.is_floating_point() and bool((labels < 0).any()):
                raise ValueError(
                    "train_dataset has labels below 0, such as -100 for a row to be ignored; "
                    "remove these rows, since a mean over the other rows would couple them."
                )
            seed = self._dropout_seed(index)
            if physical_batch.unit_of_row is not None:
                unit_of_row = physical_batch.unit_of_row.to(self.args.device)
                mechanism.module.set_units(unit_of_row, physical_batch.num_units, reduction="mean")
            for point in points:
                is_last = point is points[-1]
                # Every evaluation of a sample sees the same dropout.
                with moved_to(self._filtered, point), seeded_globals(seed, devices=self._devices):
                    with self.compute_loss_context_manager():
                        loss = self.compute_loss(model, batch)
                    # the engine wants the sum over samples, not their mean
                    (loss * (size * point.coefficient * self._loss_scale)).backward()
                    if is_last:  # before the weights are back: an engine may backpropagate again
                        mechanism.accumulate()
            if self.args.report_nonprivate_loss:
                loss_sum, rows = loss_sum + loss.item() * size, rows + size
        return loss_sum / max(rows, 1)

    def _dropout_seed(self, index: int) -> int:
        """A secret seed for what the model draws in a physical batch; the same in a replay.

        Under a public seed, one more row would move the masks of all that come after it, and with
        them the sum by more than its own clipped gradient.
        """
        step = f"dropout {self.state.global_step} {self.args.process_index} {index}"
        return int(keyed_generator(self.run.noise_key, step.encode()).integers(2**63))

    @property
    def _devices(self) -> list[int]:
        """The CUDA device of this process, if it has one."""
        device = self.args.device
        return [device.index or 0] if device.type == "cuda" else []

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Mean over the rows of a physical batch of cross-entropy, weighted by class if asked for.

        Where an image may have several labels, the row's loss is the mean of the binary
        cross-entropies of the labels that it has, and zero if it has none.

        A subclass may return another loss, if it is a mean over rows in which no row's term
        depends on another row; that is checked before training starts.
        """
        outputs = model(inputs["pixel_values"])
        logits = (outputs if isinstance(outputs, Tensor) else outputs.logits).float()
        labels = inputs["labels"]
        weights = self._class_weights
        if weights is not None:
            weights = weights.to(logits.device)
        if self.multi_label:
            losses = _masked_binary_cross_entropy(logits, labels, positive_weights=weights)
        else:
            losses = F.cross_entropy(
                logits, labels, reduction="none", label_smoothing=self.args.label_smoothing_factor
            )
            if weights is not None:  # torch's weighted mean would couple the rows of a batch
                losses = losses * weights[labels]
        loss = losses.mean()
        return (loss, {"loss": loss, "logits": logits}) if return_outputs else loss

    def compute_loss_context_manager(self) -> ExitStack:
        """Autocast to the compute type of ``bf16`` or ``fp16``; weights stay float32."""
        stack: ExitStack = super().compute_loss_context_manager()
        dtype = COMPUTE_TYPES.get(self.args.mixed_precision)
        if dtype is not None:
            stack.enter_context(torch.autocast(self.args.device.type, dtype=dtype))
        return stack

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        """Keep Accelerate's dynamic loss scaling out: it skips steps depending on raw gradients."""
        built: dict[str, Any] = super()._build_accelerator_args(**kwargs)
        return {**built, "mixed_precision": "no"}

    @property
    def _loss_scale(self) -> float:
        assert self.args.loss_scale is not None
        return self.args.loss_scale

    def _build_engine(self, model: nn.Module) -> PerSampleEngine:
        """Wrap the model in the engine that is asked for, or for which there is memory; verify it.

        The trial that tells of memory comes after verification, which refuses models that a
        forward pass changes.
        """
        passes, mode = self._filter.evaluations, self.args.grad_sample_mode
        engine = ENGINES["bookkeeping" if mode == "auto" else mode](model, passes=passes)
        self._check_per_sample_gradients(engine)
        if mode != "auto" or passes > 1:  # ghost takes one pass only
            return engine
        needed, free = self._bytes_of_a_step(engine), free_bytes(self.args.device)
        if self.args.device.type == "cpu":
            free //= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        fits = all(gather_object([needed <= free]))
        mode = "bookkeeping" if fits else "ghost"
        logger.info(
            "grad_sample_mode: %s (bookkeeping needs about %.1f GB, and %.1f GB are free)",
            mode,
            needed / 1e9,
            free / 1e9,
        )
        if fits:
            return engine
        engine.to_standard_module()
        engine = ENGINES[mode](model, passes=passes)
        self._check_per_sample_gradients(engine)
        return engine

    def _bytes_of_a_step(self, engine: PerSampleEngine) -> int:
        """Estimate the peak of a physical batch from three small ones, and all that outlives it.

        Each has one unit of most rows and others of fewest, which takes most memory: engines give
        all units the room of the largest.
        """
        fewest = self.args.augmentation_multiplicity
        most = fewest * self._most_examples
        sums = {name: torch.zeros_like(p) for name, p in self.model.named_parameters()}

        def step(small_units: int) -> None:
            rows_per_unit = torch.tensor([most] + [fewest] * small_units)
            size = int(rows_per_unit.sum())
            batch = self._prepare_inputs(self.data_collator(self._noise_rows([0, 1] * size)[:size]))
            if most > 1:
                units = torch.arange(small_units + 1).repeat_interleave(rows_per_unit)
                units = units.to(self.args.device)
                engine.set_units(units, small_units + 1, reduction="mean")
            with self.compute_loss_context_manager():
                loss = self.compute_loss(engine, batch)
            (loss * (size * self._loss_scale)).backward()
            norms = engine.per_sample_norms()
            engine.add_weighted_sum({n: torch.ones_like(u) for n, u in norms.items()}, into=sums)
            engine.discard()

        counts = (1, 3, 5)
        with torch.random.fork_rng():  # dropout
            peaks = [peak_bytes(partial(step, count)) for count in counts]
        curve = np.polyfit(counts, peaks, 2)
        curve[0] = max(curve[0], 0.0)
        small_units = max(0, (self.args.per_device_train_batch_size - most) // fewest)
        lasting = LASTING_COPIES * sum(total.nbytes for total in sums.values())
        return int(MEMORY_MARGIN * np.polyval(curve, small_units)) + lasting

    @property
    def _most_examples(self) -> int:
        """Most rows of a unit that a step uses, before they are augmented."""
        return 1 if self.units is None else min(self.units.largest, self.max_examples_per_unit)

    def _noise_rows(self, labels: Sequence[int]) -> list[dict[str, Tensor]]:
        """Rows of noise with the shapes of the training data, for trials that touch none of it."""
        generator = torch.Generator().manual_seed(0)
        return [_random_row_like(self._blank_row, label, generator) for label in labels]

    @cached_property
    def _blank_row(self) -> dict[str, Tensor]:
        """The shapes of a row; of the private row nothing else is used."""
        row = self.train_dataset[0]
        return {n: torch.zeros_like(torch.as_tensor(row[n])) for n in ("pixel_values", "labels")}

    def _check_per_sample_gradients(self, engine: PerSampleEngine) -> None:
        """Verify the engine on this run's model, collator and loss, with noise for images."""
        rows = self._noise_rows((0, 1, 0, 1, 1))

        def summed_loss(model: nn.Module, selected: Sequence[int]) -> tuple[Tensor, int]:
            batch = self._prepare_inputs(self.data_collator([rows[i] for i in selected]))
            size = len(batch["labels"])
            return self.compute_loss(model, batch) * size, size

        verify_per_sample_gradients(engine, summed_loss)

        # On more rows a loss may still do what it does not do here; the README says so.
        count = min(self.args.per_device_train_batch_size, MOST_ROWS_TRIED)
        batch = self._prepare_inputs(self.data_collator(self._noise_rows([0] * count)))

        def mean_loss(model: nn.Module, rows: slice, labels: Tensor) -> Tensor:
            chosen = {name: t[rows] for name, t in batch.items()}
            loss: Tensor = self.compute_loss(model, {**chosen, "labels": labels})
            return loss

        kinds = _kinds_of_labels(batch["labels"], classes=len(self._label_names()))
        verify_row_losses(engine, mean_loss, labels=kinds)

    # ---- ledger, budget, resume ----

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train privately until the steps or the budget are used up.

        Args:
            resume_from_checkpoint: Folder of a checkpoint, or True for the last one in
                ``output_dir``; sampling, noise, optimizer and ledger continue where they stood.
            trial: Must be None.
            ignore_keys_for_eval: As in ``Trainer``.

        Returns:
            Steps and metrics; the training loss is NaN unless ``report_nonprivate_loss``.

        Raises:
            ValueError: If the output folder already holds a ledger and nothing is resumed, or the
                checkpoint does not fit this run.
        """
        if trial is not None:
            raise ValueError("trial must be None: the cost of a search would not be counted.")
        self._check_callbacks()  # one may have been added since
        self.eval_metrics, self._last_prediction = {}, None  # of another model
        self._recover_replaced_checkpoint()
        checkpoint = self._find_checkpoint(resume_from_checkpoint)
        self.run.prepare(checkpoint)
        if checkpoint is not None and self.args.dp_filter != "none":
            if not (checkpoint / FILTER_FILE).exists():
                raise ValueError(
                    f"checkpoint {checkpoint} has no {FILTER_FILE}, the past gradients that "
                    f"dp_filter={self.args.dp_filter!r} goes on from; take another checkpoint."
                )
            self._filter.load_state_dict(
                torch.load(
                    checkpoint / FILTER_FILE, map_location=self.args.device, weights_only=True
                )
            )
        taken = 0 if checkpoint is None else _step_of(checkpoint)
        if taken >= self.plan.steps or not self.run.may_take(taken + 1):
            return self._finish_without_a_step(checkpoint)
        self._batches = None
        self.interrupted = False
        try:
            with self._interrupt:
                output: TrainOutput = super().train(
                    resume_from_checkpoint=None if checkpoint is None else str(checkpoint),
                    ignore_keys_for_eval=ignore_keys_for_eval,
                )
        except BudgetSpentError as error:
            logger.warning("Stopping after step %d: %s.", self.state.global_step, error)
            return TrainOutput(self.state.global_step, math.nan, {"epsilon": self.epsilon()})
        finally:
            if self._batches is not None:
                self._batches.close()
        loss = output.training_loss if self.args.report_nonprivate_loss else math.nan
        return TrainOutput(output.global_step, loss, output.metrics)

    def _finish_without_a_step(self, checkpoint: Path | None) -> TrainOutput:
        """Leave model and state as the checkpoint has them, and say why no step was taken."""
        if checkpoint is not None:
            self._load_from_checkpoint(str(checkpoint))
            self.state = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME))
        logger.warning(
            "No step was taken: %d of %d steps are done, and epsilon is %.4f (target %s).",
            self.state.global_step,
            self.plan.steps,
            self.epsilon(),
            self.args.target_epsilon,
        )
        return TrainOutput(self.state.global_step, math.nan, {"epsilon": self.epsilon()})

    def _recover_replaced_checkpoint(self) -> None:
        """Put back a checkpoint whose replacement was interrupted between two renames."""
        if self.is_world_process_zero():
            for kept in (self.run.folder / STAGING).glob("replaced-*"):
                final = self.run.folder / kept.name.removeprefix("replaced-")
                if not final.exists():
                    os.replace(kept, final)
        self.accelerator.wait_for_everyone()

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: each trial would spend budget that no ledger counts.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            "hyperparameter_search is refused: trials on private data cost privacy that would not "
            "be counted; tune on public data and set the arguments."
        )

    def _find_checkpoint(self, resume: str | bool | None) -> Path | None:
        if resume is None or resume is False:
            return None
        if resume is True:
            found = get_last_checkpoint(str(self.run.folder)) if self.run.folder.is_dir() else None
            if found is None:
                raise ValueError(
                    f"resume_from_checkpoint: output_dir={self.args.output_dir!r} holds no "
                    "checkpoint to go on from; choose another output_dir and start anew."
                )
            return Path(found)
        if not os.path.isdir(resume):
            raise ValueError(f"resume_from_checkpoint={resume!r} is not a folder.")
        return Path(resume)

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        """Load every weight of a checkpoint, or fail.

        The base class compares the keys in the file, which ``save_pretrained`` may have renamed,
        with those in memory, and goes on with the pretrained weights where they differ.
        """
        if isinstance(self.model, PreTrainedModel):
            saved = type(self.model).from_pretrained(resume_from_checkpoint, dtype=torch.float32)
            state = saved.state_dict()
        else:
            state = load_file(Path(resume_from_checkpoint) / SAFE_WEIGHTS_NAME)
        self.model.load_state_dict(state)

    def _load_best_model(self) -> None:
        assert self.state.best_model_checkpoint is not None
        self._load_from_checkpoint(self.state.best_model_checkpoint)

    # ---- what is logged and saved ----

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log private values only, with the epsilon spent so far."""
        for key in ("loss", "train_loss"):
            loss = logs.pop(key, None)
            if loss is not None and self.args.report_nonprivate_loss:
                logs[f"nonprivate_{key}"] = loss
        if "grad_norm" in logs and self._mechanism is not None:
            logs["signal_to_noise"] = signal_to_noise(
                gradient_norm=float(logs["grad_norm"]),
                noise_std=math.sqrt(self._known_noise.variance(max(1, self.state.global_step))),
                num_entries=self._mechanism.num_entries,
            )
        if self.ledger is not None and len(self.ledger) > 0:
            logs["epsilon"] = self.epsilon()
            if "train_runtime" in logs:  # the last log of a run says all that the number rests on
                logs["delta"] = self.plan.delta
                logs["noise_multiplier"] = self.plan.noise_multiplier
                logs["sample_rate"] = self.plan.sample_rate
                logs["noise_draws"] = len(self.ledger)
        super().log(logs, start_time)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Evaluate as ``Trainer`` does, and keep the metrics of ``eval_dataset`` for the card.

        Metrics of another data set, which may be private, stay out of it. Training goes on as if
        this had not been: the global generators are left alone.
        """
        kept = self._last_prediction
        with torch.random.fork_rng():
            metrics: dict[str, float] = super().evaluate(*args, **kwargs)
        asked = args[0] if args else kwargs.get("eval_dataset")
        if not (asked is None or asked is self.eval_dataset or isinstance(asked, str)):
            self._last_prediction = kept
            return metrics
        self.eval_metrics = {
            name.removeprefix("eval_"): float(value)
            for name, value in metrics.items()
            if name.startswith("eval_")
            and not name.endswith(("runtime", "_per_second", "_time"))
            and isinstance(value, (int, float))
        }
        return metrics

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Predict as ``Trainer`` does; the picture of confusions stays that of the evaluation."""
        kept = self._last_prediction
        try:
            return super().predict(*args, **kwargs)
        finally:
            self._last_prediction = kept

    def _compute_metrics(self, prediction: EvalPrediction) -> dict[str, float]:
        self._last_prediction = prediction
        return self._metrics_of(prediction)

    def plot_confusion(self) -> bool:
        """Draw in ``output_dir`` which class the last evaluation took for which; never pushed.

        Returns:
            Whether it was drawn: in the main process, after an evaluation, with matplotlib.
        """
        if self._last_prediction is None or not self.is_world_process_zero():
            return False
        return plot_confusion(
            self._last_prediction.predictions,
            self._last_prediction.label_ids,
            label_names=self._label_names(),
            path=self.run.folder / CONFUSION_FILE,
        )

    def _save(
        self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None
    ) -> None:
        if not self.args.should_save:
            return
        folder = self.run.folder if output_dir is None else Path(output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        # All files or none: a full disk leaves no model without its report.
        with tempfile.TemporaryDirectory(dir=folder, prefix=".incomplete-") as name:
            staging = Path(name)
            if self._loaded is not None:
                save_model(self._loaded, staging)
            else:
                assert isinstance(self.model, PreTrainedModel)
                self.model.save_pretrained(staging)
                if self.processing_class is not None:
                    self.processing_class.save_pretrained(staging)
            if self.ledger is not None and len(self.ledger) > 0:
                weights = model_card.hash_weights(staging)
                report = model_card.privacy_report(self.ledger, weights=weights)
                write_json(staging / model_card.REPORT_FILE, report.to_dict())
                self._write_card(report, staging)
            stale = {*folder.glob("model-?????-of-?????.safetensors")}
            stale |= {folder / SAFE_WEIGHTS_NAME, folder / f"{SAFE_WEIGHTS_NAME}.index.json"}
            for path in staging.iterdir():
                os.replace(path, folder / path.name)
                stale.discard(folder / path.name)
            for path in stale:  # weights of a model that was saved here before, in other shards
                path.unlink(missing_ok=True)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write the card that the ledger supports into ``output_dir``."""
        if self.ledger is None or len(self.ledger) == 0:
            raise ValueError("a card needs a ledger with noise draws: train first.")
        self._write_card(model_card.privacy_report(self.ledger), self.run.folder)

    def _label_names(self) -> tuple[str, ...]:
        if self._loaded is not None:
            return self._loaded.label_names
        assert isinstance(self.model, PreTrainedModel)
        return tuple(str(name) for name in (self.model.config.id2label or {}).values())

    def _write_card(self, report: model_card.PrivacyReport, folder: Path) -> None:
        """Write the card, and but for a checkpoint the plot of epsilon that it shows."""
        args = self.args
        assert self.ledger is not None
        has_plot = not self._staging and model_card.plot_epsilon(
            self.ledger, folder / model_card.PLOT_FILE
        )
        card = model_card.build_model_card(
            report,
            base_model=self.base_model,
            dataset=self.dataset_name,
            label_names=self._label_names(),
            recipe={
                "method": f"{FILTER_NAMES[args.dp_filter]}-{OPTIMIZER_NAMES[args.dp_optimizer]}",
                "learning rate": args.learning_rate,
                "learning rate of the rest": args.vector_learning_rate,
                "schedule": SchedulerType(args.lr_scheduler_type).value,
                "warm-up": f"{args.warmup_steps:g}",
                "expected batch size": args.logical_batch_size,
                "augmentations of an image in a step": args.augmentation_multiplicity,
                "class weights": "none" if self._class_weights is None else "yes",
                "steps": self.plan.steps,
            },
            metrics=self.eval_metrics,
            library="transformers" if self._loaded is None else self._loaded.library,
            license=args.hub_license,
            multi_label=self.multi_label,
            metrics_public=args.public_eval_split,
            has_plot=has_plot,
            num_channels=self._blank_row["pixel_values"].shape[0],
            model_name=self.hub_model_id and self.hub_model_id.split("/")[-1],
        )
        (folder / model_card.CARD_FILE).write_text(card, encoding="utf-8")

    def _get_output_dir(self, trial: Any) -> str:
        return str(self.run.folder / STAGING) if self._staging else str(self.run.folder)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Write a checkpoint under a temporary name; rename it when it is whole."""
        staging, name = self.run.folder / STAGING, f"checkpoint-{self.state.global_step}"
        if self.is_world_process_zero():
            shutil.rmtree(staging, ignore_errors=True)  # of an interrupted run
        self.accelerator.wait_for_everyone()
        self._staging = True
        try:
            super()._save_checkpoint(model, trial)
            if self.is_world_process_zero():
                self._complete_checkpoint(staging / name)
        except (OSError, RuntimeError, SafetensorError) as error:  # each library has its own
            shutil.rmtree(staging, ignore_errors=True)
            raise ValueError(
                f"{name} could not be written ({str(error).splitlines()[0]}); free space, then "
                "pass --resume_from_checkpoint last to go on from the checkpoint before it."
            ) from error
        finally:
            self._staging = False
        if self.state.best_global_step:
            best = self.run.folder / f"checkpoint-{self.state.best_global_step}"
            self.state.best_model_checkpoint = str(best)
        self.accelerator.wait_for_everyone()
        if self.is_world_process_zero():
            self.state.save_to_json(str(staging / name / TRAINER_STATE_NAME))
            for path in (staging / name).glob("rng_state*.pth"):
                path.chmod(0o600)
            final = self.run.folder / name
            if final.exists():  # of an earlier run through this step
                os.replace(final, staging / f"replaced-{name}")
            os.replace(staging / name, final)
            shutil.rmtree(staging)
            rotate_checkpoints(
                output_dir=str(self.run.folder),
                save_total_limit=self.args.save_total_limit,
                best_model_checkpoint=self.state.best_model_checkpoint,
                use_mtime=True,
            )
        self.accelerator.wait_for_everyone()
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(self.run.folder / name))

    def _complete_checkpoint(self, folder: Path) -> None:
        """Add what the base class does not know of."""
        assert self._batches is not None
        if self.args.dp_filter != "none":
            torch.save(self._filter.state_dict(), folder / FILTER_FILE)
        self.run.save(
            folder,
            step=self.state.global_step,
            sampling_state=self._batches.state_dict(),
        )

    # ---- the Hub: every way to it leads through ``hub`` ----

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Make the private repository, or check the existing one; before training, if asked to.

        Args:
            token: By default ``hub_token``, else that of ``HF_TOKEN`` or ``hf auth login``.
            private: By default ``hub_private_repo``.

        Raises:
            ValueError: If it is public but should not be, or cannot be reached or written.
        """
        self.hub_model_id = self.run.from_main(
            lambda: hub.prepare_repository(
                self._repository, **self._hub_settings(token, private, None)
            )
        )

    def push_to_hub(  # type: ignore[override]  # returns None but in the main process
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs: Any,
    ) -> CommitInfo | None:
        """Save the model and push its public files, and nothing else; see ``hub.push_folder``.

        Args:
            commit_message: Of the commit.
            blocking: Must be True.
            token: As in ``init_hf_repo``.
            revision: Branch; by default ``hub_revision``.
            private: By default ``hub_private_repo``.
            **kwargs: Ignored with a warning: the card is written from the ledger.

        Returns:
            The commit, in the main process; None elsewhere.

        Raises:
            ValueError: If nothing was trained, the guarantee is void, the repository is public but
                should not be, or the Hub cannot be reached. The saved folder can be pushed again.
        """
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        self.save_model(_internal_call=True)
        if not blocking:
            raise ValueError("blocking=False is not supported; leave it out: the model is saved.")
        if kwargs:
            logger.warning("The card is written from the ledger; ignored: %s.", ", ".join(kwargs))
        commits: list[CommitInfo] = []

        def push() -> str:
            if self.ledger is None or len(self.ledger) == 0:
                raise ValueError("push_to_hub needs a ledger with noise draws: train first.")
            settings = self._hub_settings(token, private, revision)
            message = commit_message or "End of training"
            commits.append(
                hub.push_folder(self.run.folder, self._repository, message=message, **settings)
            )
            return str(commits[0].repo_url.repo_id)

        self.hub_model_id = self.run.from_main(push)
        return commits[0] if commits else None

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Push the public files of a complete checkpoint; training goes on if that fails."""
        if (
            self._staging
            or self.interrupted
            or self.args.hub_strategy == HubStrategy.END
            or not self.is_world_process_zero()
        ):
            return
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        message = f"Training in progress, step {self.state.global_step}"
        settings = self._hub_settings(None, None, None)
        try:
            hub.push_folder(checkpoint_folder, self._repository, message=message, **settings)
        except ValueError as error:
            logger.warning("Training goes on, but pushing a checkpoint failed: %s", error)

    @property
    def _repository(self) -> str:
        return self.hub_model_id or self.args.hub_model_id or self.run.folder.absolute().name

    def _hub_settings(
        self, token: str | None, private: bool | None, revision: str | None
    ) -> dict[str, Any]:
        private = self.args.hub_private_repo if private is None else private
        return {
            "token": token or self.args.hub_token,
            "private": private is not False,
            "revision": revision or self.args.hub_revision,
        }


def _check_units(
    units: PrivacyUnits | None,
    max_examples_per_unit: int,
    *,
    num_rows: int,
    args: DPTrainingArguments,
) -> None:
    """Refuse units that are not a partition of the rows, or too large for a physical batch."""
    if max_examples_per_unit < 1:
        raise ValueError(f"max_examples_per_unit={max_examples_per_unit} must be >= 1.")
    rows_at_once = args.augmentation_multiplicity
    if units is not None:
        if units.num_rows != num_rows:
            raise ValueError(
                f"units has {units.num_rows} rows and train_dataset {num_rows}; make the units "
                "from the ids of just the rows that are trained on."
            )
        rows_at_once *= min(units.largest, max_examples_per_unit)
    if rows_at_once > args.per_device_train_batch_size:
        raise ValueError(
            f"per_device_train_batch_size={args.per_device_train_batch_size} is below the "
            f"{rows_at_once} rows of one privacy unit, which must be in memory together; raise it, "
            "or lower max_examples_per_unit or augmentation_multiplicity."
        )


def _partition_bytes(units: PrivacyUnits) -> bytes:
    return b"".join(len(rows).to_bytes(8, "big") + rows.tobytes() for rows in units.rows_of_unit)


def _masked_binary_cross_entropy(
    logits: Tensor, labels: Tensor, *, positive_weights: Tensor | None
) -> Tensor:
    """For each row the mean over the labels that are not NaN, 0 where all are: (B, K) to (B,)."""
    is_known = ~labels.isnan()
    losses = F.binary_cross_entropy_with_logits(
        logits,
        labels.nan_to_num(0.0),  # NaN would spread through the gradient of a masked entry
        pos_weight=positive_weights,
        reduction="none",
    )
    return (losses * is_known).sum(-1) / is_known.sum(-1).clamp(min=1)


def _public_name(name: str | None) -> str | None:
    """A name that may stand in a card: of the Hub, timm or this package, but no path."""
    is_name = name is not None and PUBLIC_NAME.fullmatch(name) is not None
    return name if is_name and name is not None and not Path(name).exists() else None


def _share_rows(dataset: Any, train_dataset: Any) -> bool:
    """Whether a data set holds training rows, perhaps otherwise prepared."""
    if isinstance(dataset, ConcatDataset):
        return any(_share_rows(part, train_dataset) for part in dataset.datasets)
    if isinstance(train_dataset, ConcatDataset):
        return any(_share_rows(dataset, part) for part in train_dataset.datasets)
    (root, rows), (train_root, train_rows) = _root(dataset), _root(train_dataset)
    if isinstance(root, ImageExamples) and isinstance(train_root, ImageExamples):
        same = root.fingerprint == train_root.fingerprint
    else:
        same = root is train_root
    return same and (rows is None or train_rows is None or not rows.isdisjoint(train_rows))


def _root(dataset: Any) -> tuple[Any, set[int] | None]:
    """The data set that a subset is of, and which rows of it; None for all."""
    rows: list[int] | None = None
    while isinstance(dataset, Subset):
        indices = [int(i) % len(dataset.dataset) for i in dataset.indices]  # type: ignore[arg-type]
        rows = indices if rows is None else [indices[i] for i in rows]
        dataset = dataset.dataset
    return dataset, None if rows is None else set(rows)


def _gradient_of(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None, "a release writes every gradient"
    return parameter.grad


def _only(items: list[LogicalBatch]) -> LogicalBatch:
    (item,) = items
    return item


def _random_row_like(
    row: Mapping[str, Tensor], label: int, generator: torch.Generator
) -> dict[str, Tensor]:
    """A row of noise with the shapes of ``row``.

    Some rows have blank margins, as scans do: a model may leave them out.
    """
    labels, pixels = row["labels"], row["pixel_values"]
    pixels = torch.rand(pixels.shape, generator=generator) * 2 - 1
    top, side = torch.randint(3, (2,), generator=generator).tolist()
    pixels[..., : pixels.shape[-2] * top // 4, :] = 0
    pixels[..., : pixels.shape[-1] * side // 4] = -1
    return {"pixel_values": pixels, "labels": torch.full_like(labels, label)}


def _kinds_of_labels(labels: Tensor, *, classes: int) -> list[Tensor]:
    """Random labels of every class; of several labels, 0 and 1, without and with missing ones."""
    generator = torch.Generator().manual_seed(1)
    if not labels.is_floating_point():
        random = torch.randint(classes, labels.shape, generator=generator)
        return [random.to(labels.dtype).to(labels.device)]
    whole = torch.randint(2, labels.shape, generator=generator).to(labels.dtype)
    missing = torch.rand(labels.shape, generator=generator) < 0.4
    return [whole.to(labels.device), whole.masked_fill(missing, torch.nan).to(labels.device)]


def _step_of(checkpoint: Path) -> int:
    state = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME))
    return int(state.global_step)
