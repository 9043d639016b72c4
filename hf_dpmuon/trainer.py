"""Runs the private flow inside Hugging Face's training loop.

Receives a checked model, data and arguments; drives sampling, per-sample gradients, mechanism,
ledger and optimizer; returns what ``Trainer`` returns, less what is not private.

The privacy boundary is the end of ``DPTrainer.training_step``: when it returns, every ``p.grad``
holds the private mean gradient, the ledger holds its record, and nothing raw is left on the model.
Whatever the base class does afterwards is post-processing; the optimizer steps on that release and
on nothing that is added to ``p.grad`` after it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import EvalPrediction, PreTrainedModel, TrainerCallback
from transformers.trainer_utils import TrainOutput

from hf_dpmuon.arguments import DPTrainingArguments
from hf_dpmuon.batches import DrawDataset, RowWise
from hf_dpmuon.callbacks import Interrupt, watch
from hf_dpmuon.circumstances import circumstances, is_repeatable
from hf_dpmuon.data import RepeatedUnit
from hf_dpmuon.diagnostics import SpectralReport
from hf_dpmuon.grad_sample import PerSampleEngine
from hf_dpmuon.methods import routing_table
from hf_dpmuon.model_folder import recipe_of
from hf_dpmuon.models import LoadedModel
from hf_dpmuon.plan import PrivacyPlan
from hf_dpmuon.publishing_trainer import PublishingTrainer
from hf_dpmuon.sampling import LogicalBatch, LogicalBatchLoader
from hf_dpmuon.training import checkpoints, checks
from hf_dpmuon.training.inputs import Inputs
from hf_dpmuon.training.loader import build_loader
from hf_dpmuon.training.logs import private_values
from hf_dpmuon.training.recomputing import recomputing
from hf_dpmuon.training.release import ReleaseGate
from hf_dpmuon.training.schedule import build_schedule
from hf_dpmuon.training.step import BudgetSpentError, PrivateStep
from hf_dpmuon.training.trainable import TrainableSet
from hf_dpmuon.training.trial import Trial, build_engine
from hf_dpmuon.units import PrivacyUnits
from hf_dpmuon.validation import validate_model

__all__ = ["DPTrainer"]

logger = logging.getLogger(__name__)

COMPUTE_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class DPTrainer(PublishingTrainer):
    """``Trainer`` whose gradients are private before anything else sees them.

    Args:
        model: What ``load_model`` returned, or a ``PreTrainedModel``; it stays plain.
        args: Checked arguments.
        train_dataset: The private examples, map-style. Rows are dicts with ``pixel_values`` and
            ``labels``; several labels of one row are floats, NaN where one is missing.
        eval_dataset: Examples for evaluation; not covered by the guarantee.
        data_collator: Collates rows without mixing them; only images and labels reach the model.
        processing_class: The image processor to save beside the model. Without a collator it also
            makes pixel values of rows that hold one Pillow image.
        compute_metrics: Evaluation metrics; by default those of ``metrics.build_metrics``.
        preprocess_logits_for_metrics, callbacks: As in ``Trainer``.
        optimizers: An optimizer over exactly the trainable parameters, and a scheduler.
        units: Which rows belong to each privacy unit, a patient say; each row is one if None.
        max_examples_per_unit: Most rows of a drawn unit in one step, drawn anew in each.
        repeated_unit: Ids that several rows share although each row is a unit of its own; the
            report then says what the guarantee is worth for the largest group.
        class_weights: Public weights of the classes; see ``losses.RowMeanLoss``.
        base_model: Name of the pretrained model, for the card; paths are left out.
        dataset_name: Name of the data set, for the card; paths are left out.
        **others: Refused, each with the reason.

    Raises:
        ValueError: If the model, data or arguments cannot be trained privately.

    Guarantees:
        (epsilon, delta)-differential privacy of everything that leaves ``training_step``, for
        adding or removing one privacy unit (all its rows) of ``train_dataset``, with epsilon as
        the ledger composes it.
    """

    model: nn.Module
    train_dataset: Dataset[Any]

    def __init__(
        self,
        model: LoadedModel | PreTrainedModel,
        args: DPTrainingArguments | None = None,
        *,
        train_dataset: Dataset[Any] | None = None,
        eval_dataset: Dataset[Any] | None = None,
        data_collator: Callable[[list[Any]], dict[str, Tensor]] | None = None,
        processing_class: Any = None,
        compute_metrics: Callable[[EvalPrediction], dict[str, float]] | None = None,
        preprocess_logits_for_metrics: Callable[[Tensor, Tensor], Tensor] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, Any] = (None, None),
        units: PrivacyUnits | None = None,
        max_examples_per_unit: int = 8,
        repeated_unit: RepeatedUnit | None = None,
        class_weights: Sequence[float] | None = None,
        base_model: str | None = None,
        dataset_name: str | None = None,
        **others: Any,
    ) -> None:
        args = checks.check_arguments(args, others)
        checks.check_sampling(type(self), DPTrainer)
        made = Inputs.of(
            model,
            args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            data_collator=data_collator,
            processing_class=processing_class,
            compute_metrics=compute_metrics,
            units=units,
            max_examples_per_unit=max_examples_per_unit,
            repeated_unit=repeated_unit,
            class_weights=class_weights,
            base_model=base_model,
            dataset_name=dataset_name,
            # Whoever writes a loss of his own knows what labels it takes.
            own_loss=type(self).compute_loss is not DPTrainer.compute_loss,
        )
        self.folder, self.privacy_run = made.folder, made.run
        args = made.run.args  # which has the plan's batch and length, where they were unset
        self.units, self.max_examples_per_unit = units, max_examples_per_unit
        self._row, self._loss, self.evaluations = made.row, made.loss, made.evaluations
        self._given = made.given
        self._batches: LogicalBatchLoader | None = None
        self._step: PrivateStep | None = None
        self._trainable_set: TrainableSet | None = None
        self._own_scheduler = optimizers[1]
        self._interrupt, self.interrupted = Interrupt(), False
        super().__init__(
            model=self.folder.module,
            args=args,
            data_collator=made.collator,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=self.folder.processor,
            compute_metrics=self.evaluations,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
            callbacks=callbacks,
            optimizers=optimizers,
        )
        checks.check_callbacks(self.callback_handler.callbacks, args)
        checks.check_scheduler(self.lr_scheduler, args)
        checks.check_backend(self.accelerator)
        self.label_names = ["labels"]
        watch(self.callback_handler, self.privacy_run, lambda: self.interrupted)
        self.spectral_report = SpectralReport(
            self.privacy_run,
            gradients=lambda: self.private_gradients,
            noise=lambda: self._trained.noise,
        )
        self.add_callback(self.spectral_report)

    @property
    def plan(self) -> PrivacyPlan:
        """What the accountant assumes of this run."""
        return self.privacy_run.plan

    def epsilon(self) -> float:
        """Epsilon spent so far, from the ledger."""
        return self.privacy_run.epsilon()

    @property
    def private_gradients(self) -> dict[str, Tensor] | None:
        """What the optimizer steps on next, by parameter; None but in ``on_pre_optimizer_step``.

        A callback may read these tensors and edit them in place: that is post-processing. What it
        adds to ``p.grad`` instead moves no weight.
        """
        return None if self._step is None else self._step.gate.gradients

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Logical batches, each a Poisson draw that yields its physical batches when iterated."""
        self._batches = build_loader(
            self.train_dataset,
            self.data_collator,
            args=self.args,
            plan=self.plan,
            generator_of=self.privacy_run.sampling_generator,
            first_draw=self._taken + 1,
            units=self.units,
            max_examples_per_unit=self.max_examples_per_unit,
        )
        there = partial(checks.check_still_there, self.train_dataset)
        return DrawDataset(self._batches, probe=there).as_loader()

    def num_examples(self, dataloader: DataLoader[Any]) -> int:
        """Number of privacy units for training data, of examples otherwise."""
        if isinstance(dataloader.dataset, DrawDataset):
            return self.plan.num_units
        return int(super().num_examples(dataloader))

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
            self.optimizer = self._trained.optimizer(self.model)
            logger.info("Routing of parameters:\n%s", routing_table(self.model, self.optimizer))
        return self.optimizer

    @property
    def _trained(self) -> TrainableSet:
        """The trainable set, which is fixed when it is first asked for after ``train`` began."""
        if self._trainable_set is None:
            self._trainable_set = TrainableSet.of(self.model, self.args, self.plan)
        return self._trainable_set

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> Any:
        """The schedule of the arguments, without a step at a learning rate of zero."""
        if self.lr_scheduler is not None:
            return self.lr_scheduler
        create = partial(super().create_scheduler, optimizer=optimizer)
        return build_schedule(create, self.args, num_training_steps)

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        """Keep Accelerate's dynamic loss scaling out: it skips steps depending on raw gradients."""
        built: dict[str, Any] = super()._build_accelerator_args(**kwargs)
        return {**built, "mixed_precision": "no"}

    def _wrap_model(
        self, model: nn.Module, training: bool = True, dataloader: DataLoader[Any] | None = None
    ) -> nn.Module:
        if not training or isinstance(model, PerSampleEngine):
            return model
        # No wrapper of torch's: it would add up gradients that are not private.
        prepared = self.accelerator.prepare_model(model, evaluation_mode=True)
        for tensor in prepared.state_dict().values():
            broadcast(tensor)
        return build_engine(
            prepared.train(),
            Trial.of(
                self.args,
                units=self.units,
                max_examples_per_unit=self.max_examples_per_unit,
                row=self._row,
                batch=lambda rows: self._prepare_inputs(RowWise()(rows)),
                loss=self.compute_loss,
                autocast=self.compute_loss_context_manager,
                num_classes=self._loss.num_classes,
            ),
            mode=self.args.grad_sample_mode,
            passes=self._trained.filter.evaluations,
        )

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None
    ) -> tuple[nn.Module, Any]:
        prepared: tuple[nn.Module, Any] = super()._prepare_for_training(  # type: ignore[no-untyped-call]
            max_steps, train_dataloader, resume_from_checkpoint
        )
        assert self.optimizer is not None
        checks.check_optimizer(self.optimizer, self.model)
        # Only now: whatever refuses to train has refused, and nothing was written.
        engine = prepared[0]
        assert isinstance(engine, PerSampleEngine)
        facts = circumstances(self.args, engine=engine, given=self._given)
        self.privacy_run.open(facts, is_repeatable=is_repeatable(self.args))
        self._step = PrivateStep.of(
            self.args,
            engine=engine,
            run=self.privacy_run,
            filter=self._trained.filter,
            gate=ReleaseGate(self._trained.parameters),
            loss=self.compute_loss,
            prepare=self._prepare_inputs,
            autocast=self.compute_loss_context_manager,
        )
        return prepared

    def training_step(  # type: ignore[override]  # a logical batch, not a dict
        self, model: nn.Module, inputs: LogicalBatch, num_items_in_batch: Any = None
    ) -> Tensor:
        """Replace the gradient of one logical batch by its private release; see ``PrivateStep``.

        Returns:
            Zero, or with ``report_nonprivate_loss`` the raw mean loss.
        """
        assert self._step is not None
        assert self.optimizer is not None
        checks.check_optimizer(self.optimizer, self.model)  # a callback may have added to it
        stop_votes = float(self._interrupt.requested)
        loss = self._step.take(inputs, step=self.state.global_step + 1, stop_votes=stop_votes)
        self.interrupted = self._step.mechanism.stop_votes > 0
        return torch.tensor(loss, device=self.args.device)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Mean over the rows of a physical batch; see ``losses.RowMeanLoss``.

        A subclass may return another loss, if it is a mean over rows in which no row's term
        depends on another row; that is checked before training starts.
        """
        outputs = model(inputs["pixel_values"])
        logits = (outputs if isinstance(outputs, Tensor) else outputs.logits).float()
        loss = self._loss(logits, inputs["labels"])
        return (loss, {"loss": loss, "logits": logits}) if return_outputs else loss

    def compute_loss_context_manager(self) -> ExitStack:
        """Autocast to the compute type of ``bf16`` or ``fp16``; weights stay float32."""
        stack: ExitStack = super().compute_loss_context_manager()
        dtype = COMPUTE_TYPES.get(self.args.mixed_precision)
        if dtype is not None:
            stack.enter_context(torch.autocast(self.args.device.type, dtype=dtype))
        return stack

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train privately until the steps or the budget are used up.

        Args:
            resume_from_checkpoint: Folder of a checkpoint, or True for the last in ``output_dir``.
            trial: Must be None.
            ignore_keys_for_eval: As in ``Trainer``.

        Returns:
            Steps and metrics; the training loss is NaN unless ``report_nonprivate_loss``.

        Raises:
            ValueError: If a row cannot be used, the output folder already holds a ledger and
                nothing is resumed, or the checkpoint does not fit this run.
        """
        if trial is not None:
            raise ValueError("trial must be None: the cost of a search would not be counted.")
        checks.check_callbacks(self.callback_handler.callbacks, self.args)
        self.evaluations.forget()  # of another model
        if self.is_world_process_zero():
            checkpoints.recover_replaced(self.privacy_run.folder)
        self.accelerator.wait_for_everyone()
        checkpoint = checkpoints.find_checkpoint(self.privacy_run.folder, resume_from_checkpoint)
        self.privacy_run.prepare(checkpoint)
        self.interrupted, self._batches, self._trainable_set = False, None, None
        checks.check_rows(
            self.train_dataset,
            self.eval_dataset,
            self.data_collator,
            units=self.units,
            num_units=self.plan.num_units,
            row=self._row,
            bar=not self.args.disable_tqdm,
        )
        validate_model(self.model)  # parameters may have been frozen or replaced since
        if checkpoint is not None:
            checkpoints.load_filter(self._trained.filter, checkpoint, self.args.device)
        self._taken = 0 if checkpoint is None else checkpoints.state_of(checkpoint).global_step
        if self._taken >= self.plan.steps or not self.privacy_run.may_start():
            return self._finish_without_a_step(checkpoint)
        try:
            with self._interrupt, recomputing(self.model, self.args):
                output: TrainOutput = super().train(
                    resume_from_checkpoint=None if checkpoint is None else str(checkpoint),
                    ignore_keys_for_eval=ignore_keys_for_eval,
                )
        except BudgetSpentError as error:
            logger.warning("Stopping after step %d: %s.", self.state.global_step, error)
            return TrainOutput(self.state.global_step, math.nan, {"epsilon": self.epsilon()})
        finally:
            self._take_down()
        loss = output.training_loss if self.args.report_nonprivate_loss else math.nan
        metrics = private_values(output.metrics, keep_loss=False)
        return TrainOutput(output.global_step, loss, {**metrics, "epsilon": self.epsilon()})

    def _take_down(self) -> None:
        """Leave model, optimizer and workers as if no private step had been prepared."""
        if self._batches is not None:
            self._batches.close()
        if self._step is not None:
            self._step.gate.close()
            self._step = None
        if isinstance(self.model_wrapped, PerSampleEngine):
            self.model_wrapped.close()
        self.model_wrapped = self.model

    def _finish_without_a_step(self, checkpoint: Path | None) -> TrainOutput:
        """Leave model and state as the checkpoint has them, and say why no step was taken."""
        if checkpoint is not None:
            checkpoints.load_weights(self.model, checkpoint)
            self.state = checkpoints.state_of(checkpoint)
        step, steps, target = self.state.global_step, self.plan.steps, self.args.target_epsilon
        said = "No step was taken: %d of %d steps are done, and epsilon is %.4f (target %s)."
        logger.warning(said, step, steps, self.epsilon(), target)
        return TrainOutput(step, math.nan, {"epsilon": self.epsilon()})

    def complete_checkpoint(self, checkpoint: Path) -> None:
        """Add the filter's past gradients, and what the run goes on from."""
        checkpoints.save_adapters(self.model, checkpoint)
        checkpoints.save_filter(self._trained.filter, checkpoint)
        self.privacy_run.save(checkpoint, step=self.state.global_step)

    def card_facts(self) -> dict[str, Any]:
        """Recipe, metrics and name of the model."""
        return {
            "recipe": recipe_of(
                self.args,
                optimizer=self.optimizer,
                scheduler=self._own_scheduler,
                model=self.model,
                class_weights=self._loss.weights is not None,
                steps=self.plan.steps,
            ),
            "metrics": self.eval_metrics,
            "model_name": self.hub_model_id and self.hub_model_id.split("/")[-1],
        }

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log private values only, with the epsilon spent so far."""
        private = private_values(logs, keep_loss=self.args.report_nonprivate_loss)
        if "grad_norm" in private and self._step is not None:
            norm, step = float(private["grad_norm"]), max(1, self.state.global_step)
            private["signal_to_noise"] = self._trained.signal_to_noise(norm, step=step)
        private.update(self.privacy_run.spent(in_full="train_runtime" in logs))
        super().log(private, start_time)
