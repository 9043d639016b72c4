"""What our trainers override of ``transformers.Trainer``, with the signatures that they rely on."""

from __future__ import annotations

import inspect
from typing import Any

from transformers import Trainer

from hf_dpmuon.publishing_trainer import PublishingTrainer
from hf_dpmuon.trainer import DPTrainer

# Names of the parameters of each method in ``transformers``, ``self`` left out.
OVERRIDDEN: dict[str, str] = {
    "_build_accelerator_args": "**kwargs",
    "_get_output_dir": "trial",
    "_load_best_model": "",
    "_load_from_checkpoint": "resume_from_checkpoint model",
    "_load_rng_state": "checkpoint",
    "_prepare_for_training": "max_steps train_dataloader resume_from_checkpoint",
    "_push_from_checkpoint": "checkpoint_folder",
    "_save": "output_dir state_dict",
    "_save_checkpoint": "model trial",
    "_save_rng_state": "output_dir",
    "_wrap_model": "model training dataloader",
    "compute_loss": "model inputs return_outputs num_items_in_batch",
    "compute_loss_context_manager": "",
    "create_model_card": (
        "language license tags model_name finetuned_from tasks dataset_tags dataset dataset_args"
    ),
    "create_optimizer": "model",
    "create_scheduler": "num_training_steps optimizer",
    "evaluate": "eval_dataset ignore_keys metric_key_prefix",
    "floating_point_ops": "inputs",
    "get_batch_samples": "epoch_iterator num_batches device",
    "get_train_dataloader": "",
    "hyperparameter_search": (
        "hp_space compute_objective n_trials direction backend hp_name **kwargs"
    ),
    "init_hf_repo": "token private",
    "log": "logs start_time",
    "num_examples": "dataloader",
    "predict": "test_dataset ignore_keys metric_key_prefix",
    "push_to_hub": "commit_message blocking token revision private **kwargs",
    "train": "resume_from_checkpoint trial ignore_keys_for_eval",
    "training_step": "model inputs num_items_in_batch",
}


def parameters(function: Any) -> str:
    """Names of parameters but ``self``, with the stars of the variadic ones."""
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    named = inspect.signature(function).parameters.values()
    return " ".join(stars.get(p.kind, "") + p.name for p in named if p.name != "self")


def overridden(base: type) -> set[str]:
    """Methods of ``base`` that one of our trainers defines anew."""
    ours = {name for cls in (PublishingTrainer, DPTrainer) for name in vars(cls)}
    return {n for n in ours if inspect.isfunction(getattr(base, n, None)) and n != "__init__"}


def moved(base: type) -> dict[str, str | None]:
    """Listed methods of ``base`` that are gone or take other parameters, with what they take."""
    found = {n: parameters(f) if (f := getattr(base, n, None)) else None for n in OVERRIDDEN}
    return {name: taken for name, taken in found.items() if taken != OVERRIDDEN[name]}


def test_all_overrides_are_listed_and_all_listed_are_overridden():
    assert {n for n in overridden(Trainer) if not n.startswith("__")} == set(OVERRIDDEN)


def test_transformers_takes_the_listed_parameters():
    assert not moved(Trainer)


def test_what_moved_upstream_is_said_by_name():
    class Later(Trainer):
        _save_checkpoint = None

        def _wrap_model(self, model, *, compiled=False): ...

    assert moved(Later) == {"_save_checkpoint": None, "_wrap_model": "model compiled"}
