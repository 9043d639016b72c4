"""Laws of a saved model: its card says what ran, and what the model was trained on before."""

import json
import os

import pytest
import torch
from PIL import Image
from support import Images, tiny_vit, trainer_of
from transformers import ViTForImageClassification

from hf_dpmuon.accounting import NoiseEvent, epsilon_bound
from hf_dpmuon.cli import main
from hf_dpmuon.ledger import PrivacyLedger, RunFacts
from hf_dpmuon.model_card import build_model_card, hash_weights, privacy_report, read_report
from hf_dpmuon.models import load_model, save_model


def card_of(folder):
    return (folder / "README.md").read_text()


def trained(folder, model=None, **settings):
    trainer = trainer_of(folder, model, **settings)
    trainer.train()
    trainer.save_model()
    return trainer


def test_k205_a_run_on_the_same_units_goes_on_with_the_ledger_of_its_model(tmp_path, caplog):
    first = trained(tmp_path / "one")
    model = ViTForImageClassification.from_pretrained(tmp_path / "one")
    second = trained(tmp_path / "two", model)
    assert len(second.ledger) == 2 * len(first.ledger)
    assert second.ledger.extends(first.ledger)
    assert (
        second.epsilon() == epsilon_bound(second.ledger.accounted, delta=second.plan.delta).epsilon
    )
    assert second.epsilon() > first.epsilon()
    assert "goes on with it" in caplog.text
    assert "Its draws are among those counted above" in card_of(tmp_path / "two")


def test_k205_a_model_that_is_trained_again_in_one_process_goes_on_with_its_ledger(tmp_path):
    """It was never saved, and a trainer that did not train stood in between."""
    first = trainer_of(tmp_path / "one")
    first.train()
    trainer_of(tmp_path / "idle", first.model)
    second = trained(tmp_path / "two", first.model)
    assert second.ledger.extends(first.ledger)
    assert second.epsilon() > first.epsilon()
    third = trained(tmp_path / "three", second.model, train_dataset=Images(23))
    assert [entry.steps for entry in third.folder.report(third.ledger).earlier] == [8]


@pytest.mark.parametrize("without", ["ledger", "equal number of units"])
def test_k205_else_the_card_names_both_reports(tmp_path, caplog, capsys, without):
    first = trained(tmp_path / "one")
    data = Images()
    if without == "ledger":
        (tmp_path / "one" / "privacy_ledger.jsonl").unlink()
    else:
        data = Images(len(data) - 1)
    model = ViTForImageClassification.from_pretrained(tmp_path / "one")
    second = trained(tmp_path / "two", model, train_dataset=data)
    assert not second.ledger.extends(first.ledger)
    assert "trained privately before" in caplog.text
    card = card_of(tmp_path / "two")
    assert "The private training before this one" in card
    assert "the epsilons add up" in card
    section = card.split("### The private training")[1].split("## Evaluation")[0]
    assert main(["card", str(tmp_path / "two")]) == 0
    assert section in capsys.readouterr().out  # rebuilt, it says the same
    model = ViTForImageClassification.from_pretrained(tmp_path / "two")
    third = trained(tmp_path / "three", model, train_dataset=Images(len(data) - 2))
    stated = read_report(tmp_path / "three" / "privacy_report.json").earlier
    assert [entry.steps for entry in stated] == [len(first.ledger), len(second.ledger)]
    assert not any(entry.counted for entry in stated)
    assert len(third.ledger) == third.state.global_step


@pytest.mark.parametrize("accountant", ["rdp", "prv"])
def test_k205_a_target_is_met_together_with_the_draws_of_before(tmp_path, accountant):
    """The noise is calibrated to what is left, so that the run goes to its end."""
    first = trained(tmp_path / "one", accountant=accountant)
    model = ViTForImageClassification.from_pretrained(tmp_path / "one")
    target = 1.5 * first.epsilon()
    settings = {"noise_multiplier": None, "accountant": accountant}
    second = trained(tmp_path / "two", model, target_epsilon=target, **settings)
    assert second.state.global_step == second.plan.steps
    assert 0.99 * target < second.epsilon() <= target
    with pytest.raises(ValueError, match="has spent on the same units already"):
        trainer_of(tmp_path / "no", model, target_epsilon=first.epsilon(), **settings)


def test_k205_a_run_that_goes_on_from_its_own_checkpoint_is_one_run(tmp_path):
    first = trained(tmp_path / "run", save_strategy="steps", save_steps=1)
    model = ViTForImageClassification.from_pretrained(tmp_path / "run" / "checkpoint-1")
    again = trainer_of(tmp_path / "run", model)
    assert again.folder.report(first.ledger).earlier == []
    assert again.folder.origin.ledger is None


def test_k205_a_report_that_its_ledger_contradicts_is_refused(tmp_path):
    trained(tmp_path / "one")
    file = tmp_path / "one" / "privacy_report.json"
    report = json.loads(file.read_text())
    file.write_text(json.dumps(report | {"epsilon": report["epsilon"] / 2}))
    model = ViTForImageClassification.from_pretrained(tmp_path / "one")
    with pytest.raises(ValueError, match=r"^epsilon="):
        trainer_of(tmp_path / "two", model)


def test_k205_a_model_that_was_never_private_starts_at_zero(tmp_path):
    model = tiny_vit()
    model.save_pretrained(tmp_path / "plain")
    again = ViTForImageClassification.from_pretrained(tmp_path / "plain")
    run = trained(tmp_path / "run", again)
    assert len(run.ledger) == run.state.global_step
    assert "The private training before this one" not in card_of(tmp_path / "run")
    assert read_report(tmp_path / "run" / "privacy_report.json").runs == 1


def test_k238_the_command_rebuilds_the_card_of_a_greyscale_model(tmp_path, monkeypatch, capsys):
    loaded = load_model("builtin:tiny-vit", label_names=("a", "b", "c"), image_size=28)
    save_model(loaded, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        ledger = PrivacyLedger.create(tmp_path / "privacy_ledger.jsonl")
        ledger.open_run(RunFacts(1e-5, "rdp", "image", "add or remove one", True, 1000))
        ledger.record(NoiseEvent(1, 1.1, 0.02, 1.0, "flat", "0" * 64))
    report = privacy_report(ledger, weights=hash_weights(tmp_path))
    (tmp_path / "privacy_report.json").write_text(json.dumps(report.to_dict()))
    first = build_model_card(
        report,
        base_model="builtin:tiny-vit",
        dataset=None,
        label_names=loaded.label_names,
        recipe={},
        metrics={},
        num_channels=1,
    )
    (tmp_path / "README.md").write_text(first)
    assert main(["card", str(tmp_path)]) == 0
    card = capsys.readouterr().out
    assert card == first
    Image.new("L", (50, 40), 90).save(tmp_path / "image.png")
    monkeypatch.chdir(tmp_path)
    printed: list[torch.Tensor] = []
    snippet = card.split("```python\n")[1].split("```")[0]
    folder = str(tmp_path)
    exec(snippet.replace("<this repository or folder>", folder), {"print": printed.append})
    assert printed[0].shape == (1, 3)


def test_k239_an_optimizer_and_a_scheduler_that_were_handed_in_are_named(tmp_path):
    model = tiny_vit()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.25)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    trained(tmp_path / "run", model, optimizers=(optimizer, scheduler))
    card = card_of(tmp_path / "run")
    assert "| method | DP-AdamW |" in card
    assert "| learning rate | 0.001 |" in card
    assert "| weight decay | 0.25 |" in card
    assert "| schedule | StepLR |" in card
    assert "Muon" not in card.split("## Recipe")[1].split("## How")[0]


@pytest.mark.parametrize(
    ("settings", "rows", "never"),
    [
        ({"dp_optimizer": "sgd"}, ["method | DP-SGD"], ["learning rate of", "label smoothing"]),
        ({"dp_optimizer": "muon"}, ["method | DP-Muon", "learning rate of sgd | "], ["betas"]),
        ({"dp_optimizer": "adam"}, ["method | DP-Adam", "betas | (0.9, 0.999)"], ["rate of"]),
        ({"label_smoothing_factor": 0.1}, ["label smoothing | 0.1"], []),
        ({"dp_filter": "doppler"}, ["filter coefficients | "], ["kappa"]),
        ({"dp_filter": "disk"}, ["filter gain (kappa) | 0.7"], ["coefficients"]),
    ],
)
def test_k239_the_recipe_is_what_had_an_effect(tmp_path, settings, rows, never):
    trained(tmp_path / "run", **settings)
    recipe = card_of(tmp_path / "run").split("## Recipe")[1].split("## How")[0]
    for row in rows:
        assert f"| {row}" in recipe
    for other in never:
        assert other not in recipe
