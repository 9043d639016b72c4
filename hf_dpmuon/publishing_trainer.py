"""A ``Trainer`` that saves all or nothing, and lets only public files leave.

Receives the ledger and the model of a run; writes its folder and its checkpoints, and pushes what
``hub`` allows. How gradients are made is none of its business: see ``trainer``.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import CommitInfo
from torch import nn
from transformers import Trainer
from transformers.trainer_utils import HubStrategy, rotate_checkpoints

from hf_dpmuon import hub
from hf_dpmuon.arguments import DPTrainingArguments
from hf_dpmuon.diagnostics import SPECTRAL_PLOT_FILE, SpectralReport, write_local_card
from hf_dpmuon.ledger import PrivacyLedger
from hf_dpmuon.metrics import EvaluationRecord
from hf_dpmuon.model_folder import ModelFolder
from hf_dpmuon.run import PrivateRun
from hf_dpmuon.training import checkpoints
from hf_dpmuon.training.checks import check_datasets

__all__ = ["PublishingTrainer"]

logger = logging.getLogger(__name__)

CONFUSION_FILE = "confusion.png"


class PublishingTrainer(Trainer):
    """The hooks that save and push.

    Attributes:
        privacy_run: Its ledger decides what report and card say; its folder is what is written.
        folder: Writes a saved model with report and card.
        evaluations: Those of the split that was declared for it.
        spectral_report: What singular values of private momenta were against the noise.
        interrupted: Whether a signal stopped the run; then nothing is pushed.
    """

    args: DPTrainingArguments
    hub_model_id: str | None  # type: ignore[assignment]
    privacy_run: PrivateRun
    folder: ModelFolder
    evaluations: EvaluationRecord
    spectral_report: SpectralReport
    interrupted: bool
    _staging = False
    _checked_evaluation: Any = None

    @property
    def ledger(self) -> PrivacyLedger | None:
        """The record of all noise draws; None before training, and but in the main process."""
        return self.privacy_run.ledger

    def card_facts(self) -> dict[str, Any]:
        """What the card says beside the ledger, now."""
        raise NotImplementedError

    def complete_checkpoint(self, checkpoint: Path) -> None:
        """Add what the base class does not know of, in the main process."""
        raise NotImplementedError

    # ---- what the card says of evaluations ----

    @property
    def eval_metrics(self) -> dict[str, float]:
        """Metrics of the last evaluation of ``eval_dataset``, as the card has them."""
        return self.evaluations.metrics

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Evaluate as ``Trainer`` does, and keep the metrics of ``eval_dataset`` for the card.

        Metrics of another data set, which may be private, stay out of it. Training goes on as if
        this had not been: the global generators are left alone.
        """
        if self.eval_dataset is not self._checked_evaluation:
            check_datasets(self.train_dataset, self.eval_dataset)
            self._checked_evaluation = self.eval_dataset
        asked = args[0] if args else kwargs.get("eval_dataset")
        declared = asked is None or asked is self.eval_dataset or isinstance(asked, str)
        with torch.random.fork_rng(), self.evaluations.recording(declared):
            metrics: dict[str, float] = super().evaluate(*args, **kwargs)
            self.evaluations.note(metrics)
        return metrics

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Predict as ``Trainer`` does; the picture of confusions stays that of the evaluation."""
        with self.evaluations.recording(False):
            return super().predict(*args, **kwargs)

    def plot_confusion(self) -> bool:
        """Draw in ``output_dir`` which class the last evaluation took for which; never pushed.

        Returns:
            Whether it was drawn: in the main process, after an evaluation, with matplotlib.
        """
        path = self.privacy_run.folder / CONFUSION_FILE
        return self.is_world_process_zero() and self.evaluations.plot(
            path, label_names=self.folder.label_names
        )

    def plot_spectra(self) -> bool:
        """Draw in ``output_dir`` how singular values stood against the noise; never pushed.

        Returns:
            Whether it was drawn: in the main process, after a measured step, with matplotlib.
        """
        path = self.privacy_run.folder / SPECTRAL_PLOT_FILE
        return self.is_world_process_zero() and self.spectral_report.plot(path)

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: each trial would spend budget that no ledger counts."""
        raise ValueError(
            "hyperparameter_search is refused: trials on private data cost privacy that would not "
            "be counted; tune on public data and set the arguments."
        )

    # ---- folders ----

    def _save(
        self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None
    ) -> None:
        if self.args.should_save:
            folder = self.privacy_run.folder if output_dir is None else Path(output_dir)
            self.folder.save(folder, self.ledger, with_plot=not self._staging, **self.card_facts())
            write_local_card(folder)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write the card that the ledger supports into ``output_dir``."""
        if self.ledger is None or len(self.ledger) == 0:
            raise ValueError("a card needs a ledger with noise draws: train first.")
        report = self.folder.report(self.ledger)
        self.folder.write_card(
            self.privacy_run.folder, self.ledger, report, with_plot=True, **self.card_facts()
        )

    def _get_output_dir(self, trial: Any) -> str:
        folder = self.privacy_run.folder
        return str(folder / checkpoints.STAGING if self._staging else folder)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Write a checkpoint under a temporary name; rename it when it is whole."""
        folder, is_main = self.privacy_run.folder, self.is_world_process_zero()
        wait = self.accelerator.wait_for_everyone
        name = f"checkpoint-{self.state.global_step}"
        with checkpoints.staged(folder, name, is_main=is_main) as staging:
            wait()
            self._staging = True
            try:
                super()._save_checkpoint(model, trial)
            finally:
                self._staging = False
            if is_main:
                self.complete_checkpoint(staging)
        if self.state.best_global_step:
            best = folder / f"checkpoint-{self.state.best_global_step}"
            self.state.best_model_checkpoint = str(best)
        wait()
        if is_main:
            checkpoints.publish(staging, self.state)
            rotate_checkpoints(
                output_dir=str(folder),
                save_total_limit=self.args.save_total_limit,
                best_model_checkpoint=self.state.best_model_checkpoint,
                use_mtime=True,
            )
        wait()
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(folder / name))

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        assert self.model is not None
        checkpoints.load_weights(self.model, Path(resume_from_checkpoint))

    def _save_rng_state(self, output_dir: str) -> None:
        """Write nothing: all randomness of a step comes from the run's secret keys."""

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Read nothing, for nothing was written."""

    def _load_best_model(self) -> None:
        assert self.state.best_model_checkpoint is not None
        self._load_from_checkpoint(self.state.best_model_checkpoint)

    # ---- the Hub: every way to it leads through ``hub`` ----

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Make the private repository, or check the existing one; before training, if asked to.

        Args:
            token: By default ``hub_token``, else that of ``HF_TOKEN`` or ``hf auth login``.
            private: By default ``hub_private_repo``.

        Raises:
            ValueError: If it is public but should not be, or cannot be reached or written.
        """
        where = self._where(token=token, private=private)
        self.hub_model_id = self.privacy_run.on_main_process(
            lambda: hub.prepare_repository(**where)
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
            commit_message: That of the commit.
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
        where = self._where(token=token, private=private, revision=revision)
        commits: list[CommitInfo] = []

        def push() -> str:
            if self.ledger is None or len(self.ledger) == 0:
                raise ValueError("push_to_hub needs a ledger with noise draws: train first.")
            message = commit_message or "End of training"
            commits.append(hub.push_folder(self.privacy_run.folder, message=message, **where))
            return str(commits[0].repo_url.repo_id)

        self.hub_model_id = self.privacy_run.on_main_process(push)
        return commits[0] if commits else None

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Push the public files of a complete checkpoint; training goes on if that fails."""
        is_wanted = self.is_world_process_zero() and self.args.hub_strategy != HubStrategy.END
        if not is_wanted or self._staging or self.interrupted:
            return
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        message = f"Training in progress, step {self.state.global_step}"
        try:
            hub.push_folder(checkpoint_folder, message=message, **self._where())
        except ValueError as error:
            logger.warning("Training goes on, but pushing a checkpoint failed: %s", error)

    def _where(
        self, *, token: str | None = None, private: bool | None = None, revision: str | None = None
    ) -> dict[str, Any]:
        """To which repository, as ``hub`` takes it; what is not said is as in the arguments."""
        args = self.args
        private = args.hub_private_repo if private is None else private
        return {
            "name": self.hub_model_id
            or args.hub_model_id
            or self.privacy_run.folder.absolute().name,
            "private": private is not False,
            "token": token or args.hub_token,
            "revision": revision or args.hub_revision,
        }
