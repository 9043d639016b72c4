"""Arguments: files and command line, defaults, and every refusal with its sentence."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from transformers import TrainingArguments

from hf_dpmuon.arguments import (
    REFUSED,
    REFUSED_WHEN,
    DataArguments,
    DPTrainingArguments,
    ModelArguments,
    parse_arguments,
)
from hf_dpmuon.filters import LOW_PASS
from hf_dpmuon.grad_sample import ENGINES
from hf_dpmuon.optim import ADJUST_LR
from hf_dpmuon.options import TrainingOptions, choices
from hf_dpmuon.parsing import shipped_configs
from hf_dpmuon.spectral import SPECTRAL_MAPS


def arguments(tmp_path: Path, **settings: object) -> DPTrainingArguments:
    return DPTrainingArguments(
        **{"output_dir": str(tmp_path), "noise_multiplier": 1.0, "use_cpu": True, **settings}
    )


REFUSALS = [
    ({"noise_multiplier": None}, "neither is set"),
    ({"target_epsilon": 8.0}, "both are set"),
    ({"noise_multiplier": -1.0}, "noise_multiplier=-1.0"),
    ({"noise_multiplier": float("inf")}, "noise_multiplier=inf"),
    ({"noise_multiplier": None, "target_epsilon": 0.0}, "target_epsilon=0.0"),
    ({"noise_multiplier": None, "target_epsilon": float("nan")}, "target_epsilon=nan"),
    ({"target_delta": 0.0}, "target_delta=0.0"),
    ({"target_delta": 1.0}, "target_delta=1.0"),
    ({"per_sample_max_grad_norm": 0.0}, "per_sample_max_grad_norm=0.0"),
    ({"per_sample_max_grad_norm": float("inf")}, "per_sample_max_grad_norm=inf"),
    ({"logical_batch_size": 0}, "logical_batch_size=0"),
    ({"clipping": "norm"}, "clipping='norm'"),
    ({"accountant": "gdp"}, "accountant='gdp'"),
    ({"grad_sample_mode": "ew"}, "grad_sample_mode='ew'"),
    ({"dp_optimizer": "lamb"}, "dp_optimizer='lamb'"),
    ({"noise_seed": -1}, "noise_seed=-1"),
    ({"target_delta": float("nan")}, "target_delta=nan"),
    ({"augmentation_multiplicity": 0}, "augmentation_multiplicity=0"),
    ({"eval_strategy": "never"}, "eval_strategy='never'"),
    ({"gradient_checkpointing": True, "grad_sample_mode": "hooks"}, "gradient_checkpointing=True"),
    ({"tf32": True}, "tf32=True"),
    ({"max_grad_norm": 1.0}, "per_sample_max_grad_norm"),
    ({"gradient_accumulation_steps": 4}, "logical_batch_size"),
    ({"train_sampling_strategy": "group_by_length"}, "train_sampling_strategy"),
    ({"auto_find_batch_size": True}, "per_device_train_batch_size"),
    ({"torch_compile": True}, "torch_compile"),
    ({"torch_compile_backend": "inductor"}, "torch_compile"),
    ({"deepspeed": "ds.json"}, "deepspeed"),
    ({"fsdp": "full_shard"}, "fsdp"),
    ({"hub_strategy": "checkpoint"}, "hub_strategy"),
    ({"hub_strategy": "all_checkpoints"}, "hub_strategy"),
    ({"push_to_hub": True, "noise_seed": 1}, "push_to_hub"),
    ({"push_to_hub": True, "noise_multiplier": 0.0}, "push_to_hub"),
    ({"hub_always_push": True}, "hub_always_push"),
    ({"loss_scale": 0.0}, "loss_scale=0.0"),
    ({"optim": "sgd"}, "dp_optimizer"),
    ({"optim_args": "a=1"}, "optim_args"),
    ({"include_num_input_tokens_seen": True}, "size of private batches"),
    ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha"),
    ({"use_liger_kernel": True}, "use_liger_kernel"),
    ({"debug": "underflow_overflow"}, "debug"),
    (
        {"load_best_model_at_end": True, "eval_strategy": "epoch", "save_strategy": "epoch"},
        "public_eval_split",
    ),
    ({"save_strategy": "best", "metric_for_best_model": "accuracy"}, "public_eval_split"),
    ({"max_steps": 0}, "max_steps=0 must be >= 1"),
    ({"max_steps": -2}, "max_steps=-2"),
    ({"num_train_epochs": -1}, "num_train_epochs=-1"),
    ({"per_device_eval_batch_size": 0}, "per_device_eval_batch_size=0"),
    ({"per_device_train_batch_size": -1}, "per_device_train_batch_size=-1"),
    ({"dataloader_num_workers": -1}, "dataloader_num_workers=-1"),
    ({"learning_rate": -1.0}, "learning_rate=-1.0"),
    ({"vector_learning_rate": float("nan")}, "vector_learning_rate=nan"),
    ({"weight_decay": -0.1}, "weight_decay=-0.1"),
    ({"label_smoothing_factor": 2.0}, "label_smoothing_factor=2.0"),
    ({"label_smoothing_factor": -0.1}, "label_smoothing_factor=-0.1"),
    ({"hub_license": "my own licence"}, "hub_license='my own licence'"),
    ({"report_to": "clearml"}, "report_to='clearml' may upload"),
    ({"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "epoch"}, "public_eval_split"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSALS, ids=lambda v: str(v)[:60])
def test_what_would_void_the_guarantee_is_refused_in_one_sentence(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message) as refusal:
        arguments(tmp_path, **settings)
    assert "\n" not in str(refusal.value)
    assert str(refusal.value).endswith(".")


def test_a_declared_public_split_may_choose_the_model(tmp_path):
    args = arguments(
        tmp_path,
        load_best_model_at_end=True,
        public_eval_split=True,
        eval_strategy="epoch",
        save_strategy="epoch",
    )
    assert args.load_best_model_at_end


def test_several_devices_in_one_process_are_refused(tmp_path, monkeypatch):
    # Case 58.
    monkeypatch.setattr(TrainingArguments, "n_gpu", property(lambda self: 2))
    with pytest.raises(ValueError, match="CUDA_VISIBLE_DEVICES"):
        arguments(tmp_path)


@pytest.mark.parametrize("variable", ["ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"])
def test_sharding_launchers_are_refused(tmp_path, monkeypatch, variable):
    monkeypatch.setenv(variable, "true")
    with pytest.raises((ValueError, ImportError)):
        arguments(tmp_path)


def test_the_compute_type_of_the_launcher_counts_and_fp8_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert arguments(tmp_path).mixed_precision == "bf16"
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    with pytest.raises(ValueError, match="fp8"):
        arguments(tmp_path)


def test_fp16_has_a_loss_scale_and_nothing_else_has(tmp_path):
    assert arguments(tmp_path).loss_scale == 1.0
    assert arguments(tmp_path, bf16=True).loss_scale == 1.0
    assert arguments(tmp_path, fp16=True).loss_scale == 1024.0
    assert arguments(tmp_path, fp16=True, loss_scale=8.0).loss_scale == 8.0


def test_defaults_that_differ_from_the_base_class_are_the_documented_ones(tmp_path):
    args = arguments(tmp_path)
    assert args.max_grad_norm == 0  # case 109
    assert args.remove_unused_columns is False  # case 86
    assert args.hub_private_repo is True  # case 80
    assert args.lr_scheduler_type.value == "cosine"
    assert args.warmup_steps == 0.05
    assert args.report_to == []
    assert args.learning_rate is None  # it follows from the run
    assert args.num_train_epochs is None


def test_an_output_folder_of_its_own_is_chosen_when_none_is_named():
    args = DPTrainingArguments(noise_multiplier=1.0, use_cpu=True)
    assert args.output_dir.startswith("outputs/")


def test_every_field_of_ours_has_help():
    base = {f.name for f in dataclasses.fields(TrainingArguments)}
    for kind in (ModelArguments, DataArguments, DPTrainingArguments):
        for field in dataclasses.fields(kind):
            if kind is not DPTrainingArguments or field.name not in base:
                assert field.metadata.get("help"), field.name


def config(tmp_path: Path, text: str) -> str:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return str(path)


def test_the_command_line_wins_over_the_file(tmp_path):
    path = config(
        tmp_path,
        "noise_multiplier: 1e0\nlogical_batch_size: 16\nrandom_flip: false\n"
        f"output_dir: {tmp_path}\nuse_cpu: true\n",
    )
    model, data, args = parse_arguments(["--config", path, "--logical_batch_size", "32"])
    assert (args.noise_multiplier, args.logical_batch_size) == (1.0, 32)
    assert data.random_flip is False
    assert model.model_name_or_path == "builtin:tiny-vit"


def test_unknown_keys_are_refused_with_the_closest_known_one(tmp_path):
    path = config(tmp_path, "target_epsilom: 8\n")
    with pytest.raises(ValueError, match=r"'target_epsilom'.*'target_epsilon'"):
        parse_arguments(["--config", path])
    with pytest.raises(ValueError, match=r"'dataset_nam'.*'dataset_name'"):
        parse_arguments(["--noise_multiplier", "1", "--dataset_nam", "x"])


def test_half_a_name_is_not_a_name(tmp_path):
    # An abbreviation would change its meaning when an option is added.
    with pytest.raises(ValueError, match="target_eps"):
        parse_arguments(["--target_eps", "8"])


@pytest.mark.parametrize("text", ["- a\n- b\n", "a: [\n", "just words"])
def test_a_file_that_is_no_mapping_is_refused(tmp_path, text):
    with pytest.raises(ValueError, match="config="):
        parse_arguments(["--config", config(tmp_path, text)])
    with pytest.raises(ValueError, match="cannot be read"):
        parse_arguments(["--config", str(tmp_path / "absent.yaml")])


def test_a_value_of_the_wrong_type_is_refused():
    with pytest.raises(ValueError, match="target_epsilon"):
        parse_arguments(["--target_epsilon", "eight"])


def test_a_wrong_choice_in_data_arguments_is_refused():
    with pytest.raises(ValueError, match="on_corrupt='ignore'"):
        DataArguments(on_corrupt="ignore")


@pytest.mark.parametrize("name", shipped_configs())
def test_shipped_configs_are_accepted_by_name_in_every_folder(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, _, args = parse_arguments(["--config", name, "--use_cpu"])
    assert args.target_epsilon is not None


def test_shipped_configs_are_those_of_the_repository_and_have_one_name_each():
    files = sorted(Path("configs").rglob("*.yaml"), key=lambda path: path.stem)
    assert [path.resolve() for path in files] == list(shipped_configs().values())


def test_a_file_of_ones_own_wins_over_a_shipped_one_and_a_folder_does_not(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("dpsgd").mkdir()
    assert parse_arguments(["--config=dpsgd"])[2].dp_optimizer == "sgd"
    Path("quickstart").write_text("target_epsilon: 3\nmax_steps: 7\n")
    assert parse_arguments(["--config=quickstart"])[2].max_steps == 7


@pytest.mark.parametrize("config", ["quickstrat", "dpsgd.yaml", "medical/ham10000"])
def test_a_config_that_is_neither_file_nor_name_is_refused_with_the_names(config):
    with pytest.raises(
        ValueError, match=f"config='{config}' .*dpmuon_s, dpsgd, ham10000"
    ) as refusal:
        parse_arguments([f"--config={config}"])
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("in_file", "option", "dropped"),
    [
        ("eval_fraction: 0.2", "--eval_split=test", "eval_fraction"),
        ("eval_split: test", "--eval_fraction=0.2", "eval_split"),
        ("noise_multiplier: 1.0", "--target_epsilon=3", "noise_multiplier"),
        ("label_column: dx", "--label_columns=edema", "label_column"),
    ],
)
def test_an_option_drops_its_alternative_from_the_file(tmp_path, in_file, option, dropped):
    config = tmp_path / "run.yaml"
    rest = "" if "noise" in in_file else "target_epsilon: 8\n"
    config.write_text(f"{rest}{in_file}\nuse_cpu: true\noutput_dir: {tmp_path}\n")
    groups = parse_arguments([f"--config={config}", option])
    name = option[2:].split("=")[0]
    values = {key: value for group in groups for key, value in vars(group).items()}
    assert values[dropped] is None
    assert values[name] is not None


def test_epochs_on_the_command_line_are_not_overruled_by_steps_in_the_file(tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text(f"target_epsilon: 8\nmax_steps: 60\nuse_cpu: true\noutput_dir: {tmp_path}\n")
    *_, args = parse_arguments([f"--config={config}", "--num_train_epochs=5"])
    assert (args.max_steps, args.num_train_epochs) == (-1, 5)


def test_a_tracker_that_is_not_installed_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("hf_dpmuon.arguments.get_available_reporting_integrations", list)
    with pytest.raises(ValueError, match="report_to='wandb' is not installed"):
        arguments(tmp_path, report_to="wandb")


def test_raw_losses_are_not_sent_anywhere(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "hf_dpmuon.arguments.get_available_reporting_integrations", lambda: ["wandb"]
    )
    arguments(tmp_path, report_to="wandb")
    with pytest.raises(ValueError, match="would send raw losses to wandb"):
        arguments(tmp_path, report_to="wandb", report_nonprivate_loss=True)


@pytest.mark.parametrize("kind", ["file", "below a file", "empty"])
def test_a_folder_that_cannot_be_made_is_refused_before_the_data_is_read(tmp_path, kind):
    (tmp_path / "file").write_text("")
    folder = {"file": tmp_path / "file", "below a file": tmp_path / "file" / "x", "empty": ""}
    with pytest.raises(ValueError, match="cannot be made or written"):
        DPTrainingArguments(str(folder[kind]), target_epsilon=8, use_cpu=True)


def parsed(folder, text: str, *options: str):
    config = folder / "run.yaml"
    config.write_text(f"target_epsilon: 8\nuse_cpu: true\noutput_dir: {folder}\n{text}\n")
    return parse_arguments([f"--config={config}", *options])


def test_values_of_the_file_are_read_as_on_the_command_line(tmp_path):
    _, data, args = parsed(
        tmp_path,
        "class_weights: balanced\nlabel_columns: Edema\ndicom_window: [-600, 1500]\n"
        "random_flip: false\nsave_strategy: no\nmax_steps: 7\n"
        "lr_scheduler_kwargs: {num_cycles: 2}\n"
        "learning_rate: 1e-3\ntarget_delta: null",
    )
    assert data.class_weights == ["balanced"]
    assert data.label_columns == ["Edema"]
    assert data.dicom_window == [-600, 1500]
    assert data.random_flip is False
    assert (args.max_steps, args.learning_rate, args.target_delta) == (7, 1e-3, None)
    assert args.lr_scheduler_kwargs == {"num_cycles": 2}


@pytest.mark.parametrize(
    "text",
    [
        "max_steps: 1.5",
        "dicom_window: [a, b]",
        "per_sample_max_grad_norm: [1, 2]",
        "logical_batch_size: true",
        "max_examples_per_unit: 2.5",
        "seed: 1.5",
        "max_steps: {a: b}",
    ],
)
def test_values_of_another_type_in_the_file_are_refused_in_one_sentence(tmp_path, text):
    with pytest.raises(ValueError, match=text.split(":")[0]) as refusal:
        parsed(tmp_path, text)
    assert "\n" not in str(refusal.value)


def test_a_file_that_is_no_text_or_no_yaml_is_named_in_one_sentence(tmp_path):
    config = tmp_path / "run.yaml"
    for content in (b"\xff\xfe\x00", b"a: [1\nb: }"):
        config.write_bytes(content)
        with pytest.raises(ValueError, match=r"run\.yaml' cannot be read") as refusal:
            parse_arguments([f"--config={config}"])
        assert "\n" not in str(refusal.value)


def test_k229_text_of_the_file_is_taken_as_written(tmp_path):
    model, data, args = parsed(
        tmp_path,
        "model_revision: 0123456\ndataset_revision: 1.10\ntrain_split: 12:30\n"
        "logical_batch_size: 010\nlabel_columns: [no, yes, null, 1e3]\nhub_model_id: on",
    )
    assert model.model_revision == "0123456"
    assert (data.dataset_revision, data.train_split) == ("1.10", "12:30")
    assert data.label_columns == ["no", "yes", "null", "1e3"]
    assert (args.logical_batch_size, args.hub_model_id) == (10, "on")


@pytest.mark.parametrize(
    "text",
    [
        "target_epsilon: 1\nmax_steps: 3\ntarget_epsilon: 8",
        "max_steps: 3\nmax_steps: 3",
        "image_column: a\n'image_column': b",
        "seed:\nseed: 1",
    ],
)
def test_k229_a_key_that_stands_twice_is_refused(tmp_path, text):
    with pytest.raises(ValueError, match="stands twice in"):
        parsed(tmp_path, text)


@pytest.mark.parametrize(
    "words",
    [
        ["--num_train_epochs", "2"],
        ["--num_train_epochs=2"],
        ["--num-train-epochs", "2"],
        ["--num-train-epochs=2"],
    ],
    ids=" ".join,
)
def test_k230_every_spelling_of_an_option_wins_over_the_file(tmp_path, words):
    args = parsed(tmp_path, "max_steps: 5", *words)[2]
    assert (args.num_train_epochs, args.max_steps) == (2, -1)


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("--epsilon=3", "target_epsilon"),
        ("--delta=1e-5", "target_delta"),
        ("--sigma=1", "noise_multiplier"),
        ("--batch-size=8", "logical_batch_size"),
        ("--adjust_lr=paper", "adjust_lr_fn"),
        ("--num_train-epochs=2", "num_train_epochs"),
    ],
)
def test_k269_what_people_write_is_told_by_its_name_here(word, meant):
    with pytest.raises(ValueError, match=f"did you mean '{meant}'"):
        parse_arguments([word])


@pytest.mark.parametrize(("old", "new"), [("keller", "quintic"), ("you", "quintic_tuned")])
def test_k265_an_old_name_is_refused_with_the_new_one(tmp_path, old, new):
    with pytest.raises(ValueError, match=f"is called '{new}' now"):
        arguments(tmp_path, ns_coefficients=old)


@pytest.mark.parametrize("name", ["clearml", "dagshub", "dvclive", "flyte", "neptune"])
def test_k201_integrations_that_upload_folders_are_refused(tmp_path, name):
    with pytest.raises(ValueError, match=r"report_to=.*(upload|is not installed)"):
        arguments(tmp_path, report_to=[name])


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("WANDB_LOG_MODEL", "checkpoint"),
        ("WANDB_LOG_MODEL", "end"),
        ("HF_MLFLOW_LOG_ARTIFACTS", "1"),
    ],
)
def test_k201_variables_that_upload_checkpoints_are_refused(tmp_path, monkeypatch, variable, value):
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=f"{variable}='{value}' would make"):
        arguments(tmp_path)


def test_k263_bf16_works_where_the_launcher_says_cpu(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert arguments(tmp_path, bf16=True, use_cpu=False).mixed_precision == "bf16"


def test_k236_predicting_is_refused_with_what_to_do_instead(tmp_path):
    with pytest.raises(ValueError, match="do_predict=True has no effect"):
        arguments(tmp_path, do_predict=True)
    assert arguments(tmp_path).do_train
    assert not parse_arguments(["--target_epsilon=8", "--do_train=False"])[2].do_train


def said_by(capsys, *words: str) -> str:
    with pytest.raises(SystemExit) as end:
        parse_arguments(words)
    assert end.value.code == 0
    return capsys.readouterr().out


def test_help_is_two_screens_and_has_choices_and_defaults(capsys):
    lines = said_by(capsys, "--help").splitlines()
    assert len(lines) <= 80
    assert max(map(len, lines)) <= 100
    said = " ".join(" ".join(lines).split())
    for name in ("target_epsilon", "dataset_name", "model_name_or_path", "output_dir"):
        assert f"--{name}" in said
    assert "One of sgd, adam, muon, muon_s. (muon)" in said
    assert "--ns_steps" not in said  # few runs set it


def test_help_all_has_every_option_and_marks_the_refused_ones(capsys):
    said = " ".join(said_by(capsys, "--help-all").split())
    for kind in (ModelArguments, DataArguments, DPTrainingArguments):
        for option in dataclasses.fields(kind):
            assert not option.init or f"--{option.name} " in said
    for name, reason in REFUSED.items():
        entry = said.split(f"--{name} ")[1].split(" --")[0]
        assert "Refused" in entry
        assert reason in entry


@pytest.mark.parametrize("name", sorted(set(REFUSED) - set(REFUSED_WHEN)))
def test_an_option_that_is_marked_as_refused_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match=f"^{name}="):
        arguments(tmp_path, **{name: {"skip_memory_metrics": False}.get(name, 3)})


def test_names_that_help_lists_are_those_of_the_rooms_that_read_them():
    names = choices(TrainingOptions)
    assert set(names["spectral_map"]) == set(SPECTRAL_MAPS)
    assert names["doppler_coefficients"] == tuple(LOW_PASS)
    assert names["adjust_lr_fn"] == (None, *ADJUST_LR)
    assert set(names["grad_sample_mode"]) == {*ENGINES, "auto"}


def test_a_budget_that_is_changed_after_construction_counts(tmp_path):
    args = arguments(tmp_path, noise_multiplier=None, target_epsilon=8.0)
    args.target_epsilon = 1.0
    assert args.budget.plan(10_000).epsilon <= 1.0


@pytest.mark.parametrize("text", ["[3.4445, -4.775, 2.0315]", "quintic_tuned"])
def test_coefficients_stand_in_the_file_as_a_name_or_a_list(tmp_path, text):
    method = parsed(tmp_path, f"ns_coefficients: {text}")[2].method
    assert method.ns_coefficients in ("quintic_tuned", (3.4445, -4.775, 2.0315))
