"""What leaves for the Hub: real clients against a Hub on loopback that keeps every byte."""

from __future__ import annotations

import ast
import base64
import hashlib
import inspect
import json
import os
import shutil
import signal
import socket
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub import HfApi, constants
from loopback_hub import READ_TOKEN, TOKEN, USER, LoopbackHub
from safetensors.torch import load_file, save_file
from support import Images, arguments, as_loaded, in_processes, script, trainer_of
from transformers import (
    AutoModelForImageClassification,
    BeitConfig,
    CLIPConfig,
    ConvNextConfig,
    Dinov2Config,
    PreTrainedConfig,
    SwinConfig,
    Trainer,
    TrainerCallback,
    ViTConfig,
    ViTImageProcessor,
)

import hf_dpmuon
from hf_dpmuon import hub, public_files
from hf_dpmuon.data import ImageFormat
from hf_dpmuon.model_card import hash_weights, plain, read_report
from hf_dpmuon.models import load_model, save_model
from hf_dpmuon.publishing_trainer import PublishingTrainer
from hf_dpmuon.trainer import DPTrainer

ROOT = Path(__file__).parents[1]
REPOSITORY = f"{USER}/scans"
MODEL_FILES = {
    "model.safetensors",
    "config.json",
    "README.md",
    "privacy_report.json",
    "epsilon.png",
}
NOTHING_SENT = [("POST", "/preupload/"), ("PUT", "/lfs/"), ("POST", "/commit/")]


@pytest.fixture
def server(monkeypatch, tmp_path) -> Iterator[LoopbackHub]:
    """A Hub, and this process's clients pointed at it; waits are over at once."""
    with LoopbackHub() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)
        template = server.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setattr(time, "sleep", lambda _: None)
        yield server


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A folder after a run with checkpoints, and what else may lie in such a folder."""
    folder = tmp_path_factory.mktemp("runs") / "scans"
    trainer = trainer_of(folder, noise_seed=None, save_strategy="steps", save_steps=2)
    trainer.train()
    trainer.save_model()
    trainer.save_state()
    (folder / "runs").mkdir()
    for name in ("training_args.bin", "optimizer.pt", "runs/events.out.tfevents.1", "patients.csv"):
        (folder / name).write_text("not for others")
    return folder


@pytest.fixture
def folder(trained, tmp_path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "scans"))


def bytes_of(folder: Path) -> dict[str, str]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def assert_nothing_sent(server: LoopbackHub) -> None:
    assert [server.asked(*request) for request in NOTHING_SENT] == [0, 0, 0]
    assert server.uploaded == {}


def announced(server: LoopbackHub) -> set[str]:
    """Paths that a client asked to upload, committed or not."""
    bodies = [json.loads(r.body) for r in server.requests if "/preupload/" in r.path]
    return {file["path"] for body in bodies for file in body["files"]}


# ---- a run from training to the model that others load ----

RUN = """
import json, sys
import huggingface_hub.constants  # before support goes offline
import support, torch
from pathlib import Path
from PIL import Image
from transformers import AutoModelForImageClassification, ViTImageProcessor, pipeline
from hf_dpmuon.data import ImageFormat
from hf_dpmuon.models import LoadedModel
from hf_dpmuon.trainer import DPTrainer

class Patients(support.Images):
    def __getitem__(self, row):
        return {**super().__getitem__(row), "patient": f"MRN-00471{row:02d}"}

model = support.tiny_vit()
names = ("benign", "malignant", "unclear")
model.config.id2label = dict(enumerate(names))
model.config.label2id = {name: i for i, name in enumerate(names)}
processor = ViTImageProcessor(size={"height": 8, "width": 8})
image_format = ImageFormat(8, 8, 3, (0.5,) * 3, (0.5,) * 3, "bilinear")
loaded = LoadedModel(model, image_format, processor, "transformers", names, ())
folder = Path(sys.argv[1])
args = support.arguments(
    folder, noise_seed=None, push_to_hub=True, save_strategy="steps", save_steps=1, max_steps=3,
    report_nonprivate_loss=True, seed=424242,
)
base = folder.parent / "base"
base.mkdir()
trainer = DPTrainer(
    loaded, args, train_dataset=Patients(), eval_dataset=Patients(), base_model=str(base),
    dataset_name=str(base),
)
(folder / "training_args.bin").write_text("no")
trainer.train()
(folder / "patients.csv").write_text("MRN-0047101")
trainer.evaluate()
trainer.save_model()
trainer.save_state()
commit = trainer.push_to_hub(tags=["x"])
pixels = torch.stack([Patients()[row]["pixel_values"] for row in range(4)])
pushed = AutoModelForImageClassification.from_pretrained(commit.repo_url.repo_id)
classify = pipeline("image-classification", model=commit.repo_url.repo_id)
answer = classify(Image.new("L", (20, 12), 90))
with torch.no_grad():
    same = torch.equal(pushed(pixels).logits, trainer.model.eval()(pixels).logits)
losses = [v for log in trainer.state.log_history for k, v in log.items() if "nonprivate" in k]
starts = json.loads(Path(f"{folder.absolute()}.secrets/keys.json").read_text())["starts"]
keys = [start["key"] for start in starts.values()]
states = [json.loads(p.read_text()) for p in folder.glob("checkpoint-*/privacy_state.json")]
print("RESULT" + json.dumps({
    "same": same, "losses": losses, "states": states, "repository": trainer.hub_model_id,
    "keys": keys,
    "answer": [a["label"] for a in answer], "files": [p.name for p in folder.rglob("*")],
}))
"""


def test_a_run_pushes_its_model_and_no_secret(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "mrs-miller"))
    monkeypatch.setenv("USER", "mrs-miller")
    with LoopbackHub() as server:
        done = server.python(RUN, str(tmp_path / "scans"), home=tmp_path / "hf")
    found = json.loads(done.stdout.split("RESULT")[1].splitlines()[0])
    assert found["same"]
    assert set(found["answer"]) == {"benign", "malignant", "unclear"}
    assert found["repository"] == REPOSITORY
    # Every commit held these files, and no other file was ever offered.
    repository = server.repositories[REPOSITORY]
    allowed = MODEL_FILES | {"preprocessor_config.json"}
    assert announced(server) == set(server.uploaded[REPOSITORY]) == allowed
    assert set(repository.files) == allowed | {".gitattributes"}
    steps = [f"Training in progress, step {step}" for step in (1, 2, 3)]
    assert repository.messages[1:] == [*steps, "Model save"]  # the last push changed nothing
    assert repository.created_private
    assert repository.private
    # What must stay behind was there to be sent.
    assert {"optimizer.pt", "trainer_state.json", "privacy_state.json"} <= set(found["files"])
    assert len(found["losses"]) == 4
    assert len(found["states"]) == 3
    secrets = [text for loss in found["losses"] for text in (repr(loss), f"{loss:.6f}")]
    assert len(found["keys"]) == 1
    secrets += found["keys"]
    secrets += ["MRN-00471", "patient-", "424242", '"seed"', "noise_seed", "nonprivate"]
    secrets += [str(tmp_path), "mrs-miller", TOKEN]
    received = server.received_bytes
    assert b"ViTForImageClassification" in received  # one does see what was sent
    assert b"differential" in received
    for secret in secrets:
        assert secret.encode() not in received, secret
    for key in found["keys"]:
        assert bytes.fromhex(key) not in received
        assert base64.b64encode(bytes.fromhex(key)) not in received


class LargerImages(Images):
    def __init__(self) -> None:
        super().__init__()
        self.pixels = torch.randn(len(self.labels), 3, 160, 160)


def test_timm_loads_what_was_pushed(server, tmp_path):
    import timm

    model = timm.create_model("test_vit", num_classes=3)
    trainer = DPTrainer(
        replace(
            as_loaded(model),
            image_format=ImageFormat(160, 160, 3, (0.5,) * 3, (0.5,) * 3, "bicubic"),
        ),
        arguments(tmp_path / "scans", noise_seed=None, max_steps=1),
        train_dataset=LargerImages(),
    )
    trainer.train()
    trainer.push_to_hub()
    assert set(server.uploaded[REPOSITORY]) == MODEL_FILES
    pushed = timm.create_model(f"hf-hub:{REPOSITORY}", pretrained=True)
    pixels = LargerImages().pixels[:4]
    with torch.no_grad():
        assert torch.equal(pushed.eval()(pixels), model.eval()(pixels))


def test_shards_are_pushed_and_load_but_no_weights_of_another_model(server, folder):
    plain = AutoModelForImageClassification.from_pretrained(folder)
    plain.save_pretrained(folder, max_shard_size="10KB")
    restate(folder)
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    with pytest.raises(ValueError, match="save the model into a new folder"):
        hub.push_folder(folder, "scans")  # the single file of before is still there
    (folder / "model.safetensors").unlink()
    restate(folder)
    hub.push_folder(folder, "scans")
    pushed = AutoModelForImageClassification.from_pretrained(REPOSITORY)
    assert all(
        torch.equal(a, b)
        for a, b in zip(plain.state_dict().values(), pushed.state_dict().values(), strict=True)
    )
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(ValueError, match="save the model into a new folder"):
        hub.push_folder(folder, "scans")


def test_k205_the_report_of_a_model_on_the_hub_is_found(server, folder, tmp_path):
    """By `load_model` and for a model that `from_pretrained` loaded; no report is no word."""
    stated = read_report(folder / "privacy_report.json")
    server.add_model(REPOSITORY, {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()})
    server.add_model(f"{USER}/public", {"config.json": (folder / "config.json").read_bytes()})
    plain = AutoModelForImageClassification.from_pretrained(folder)
    for name, earlier in {REPOSITORY: stated, f"{USER}/public": None, f"{USER}/none": None}.items():
        plain.name_or_path = plain.config._name_or_path = name
        loaded = replace(as_loaded(plain), library="transformers", source=name)
        for number, model in enumerate((plain, loaded)):
            trainer = trainer_of(tmp_path / f"{name.split('/')[1]}-{number}", model)
            origin = trainer.folder.origin
            assert (origin and origin.report) == earlier
            assert origin is None or origin.ledger is None  # which is never pushed
    timm_name = replace(as_loaded(plain), source=f"timm/{REPOSITORY}")
    assert trainer_of(tmp_path / "timm", timm_name).folder.origin.report == stated


# ---- the allow-list ----


def test_of_a_folder_only_the_allowed_files_leave(server, folder):
    before = bytes_of(folder)
    commit = hub.push_folder(folder, "scans")
    assert commit.repo_url.repo_id == REPOSITORY
    assert announced(server) == set(server.uploaded[REPOSITORY]) == MODEL_FILES
    assert all(
        hashlib.sha256(content).hexdigest() == before[name]
        for name, content in server.uploaded[REPOSITORY].items()
    )
    assert b"not for others" not in server.received_bytes
    assert bytes_of(folder) == before


def test_every_way_to_the_hub_leads_through_one_module():
    # What the base class does with the Hub, this project does itself.
    touching = {
        name
        for name, method in inspect.getmembers(Trainer, inspect.isfunction)
        if "hf_api(" in inspect.getsource(method)
    }
    assert touching == {"init_hf_repo", "push_to_hub", "_push_from_checkpoint"}
    assert touching <= set(vars(PublishingTrainer))
    package = Path(hf_dpmuon.__file__).parent
    sending = {"create_commit", "create_repo", "upload_file", "upload_folder", "HfApi"}
    users = set()
    for path in package.rglob("*.py"):
        nodes = ast.walk(ast.parse(path.read_text()))
        names = {getattr(n, "attr", None) or getattr(n, "id", None) for n in nodes}
        if names & sending:
            users.add(path.name)
    assert users == {"hub.py"}


def test_a_run_calls_no_other_function_that_uploads(server, tmp_path, monkeypatch):
    def forbid(name: str) -> Any:
        def refuse(*_: Any, **__: Any) -> None:
            raise AssertionError(f"{name} was called")

        return refuse

    for name in dir(HfApi):
        if name.startswith(("upload_", "delete_", "update_", "super_", "move_")):
            monkeypatch.setattr(HfApi, name, forbid(name))
    for name in dir(huggingface_hub):
        if name.startswith("upload_"):
            monkeypatch.setattr(huggingface_hub, name, forbid(name))
    trainer = trainer_of(
        tmp_path / "scans", noise_seed=None, push_to_hub=True, save_strategy="steps", save_steps=2
    )
    trainer.train()
    trainer.save_model()
    trainer.push_to_hub()
    assert len(server.repositories[REPOSITORY].messages) == 4  # two checkpoints, one save


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def restate(folder: Path) -> None:
    """Make the report one of the weights that are in the folder now."""
    change(folder / "privacy_report.json", weights=hash_weights(folder))


PATHS = [
    "/home/miller/vit",
    "~/vit",
    "~miller/vit",
    "C:\\Users\\miller",
    "C:/Users/miller",
    "\\\\clinic-nas\\scans\\ct",
    "file:///home/miller/vit",
    "file:/home/miller",
    "s3://clinic/patients",
    "local-dir:/home/miller/vit",
    "path=/home/miller/vit",
    "../scans/ct",
    "see (/home/miller/vit)",
]
IN_JSON_ONLY = ["/data", "patients/P001.png", "scans\\Mrs Miller 7.dcm", "splits/train.csv"]


@pytest.mark.parametrize("path", [*PATHS, *IN_JSON_ONLY])
def test_local_paths_do_not_leave(server, folder, path):
    config = json.loads((folder / "config.json").read_text())
    holders: list[dict[str, Any]] = [
        {"_name_or_path": path},
        {path: 1},
        {"a": {"label_names": [path]}},
        {"a": [{path: 1}]},
    ]
    for more in holders:
        (folder / "config.json").write_text(json.dumps({**config, **more}))
        with pytest.raises(ValueError, match=r"config\.json names the local path"):
            hub.push_folder(folder, "scans")
    assert server.requests == []
    # Names of classes are public, in the card too.
    (folder / "config.json").write_text(json.dumps(config))
    change(folder / "config.json", id2label={"0": path, "1": "b", "2": "c"})
    card = folder / "README.md"
    text = card.read_text()
    card.write_text(f"{text}\nClasses: {plain(path)}, b, c\n")
    hub.push_folder(folder, "scans")
    sent = len(server.requests)
    (folder / "config.json").write_text(json.dumps(config))
    if path in PATHS:
        for shown in (path, plain(path), f"`{path}`"):
            card.write_text(f"{text}\nBase model: {shown}\n")
            with pytest.raises(ValueError, match=r"README\.md names the local path"):
                hub.push_folder(folder, "scans")
    assert len(server.requests) == sent


def written_by_timm(name: str, folder: Path) -> Any:
    import timm
    from timm.models._hub import save_config_for_hf

    with torch.device("meta"):
        model = timm.create_model(name, num_classes=3)
    save_config_for_hf(model, str(folder / "config.json"), {"label_names": ["a/b.png", "b", "c"]})
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize(
    "config",
    [
        *(c() for c in (ViTConfig, Dinov2Config, SwinConfig, BeitConfig, ConvNextConfig)),
        CLIPConfig(),
        ViTImageProcessor(),
        *("test_vit", "vit_base_patch16_siglip_224", "convnext_atto", "nf_resnet50"),
    ],
    ids=lambda c: c if isinstance(c, str) else type(c).__name__,
)
def test_what_libraries_write_names_no_local_path(config, tmp_path):
    if isinstance(config, str):
        import timm

        values = [written_by_timm(config, tmp_path)]
        # What older versions of timm wrote down as well: where the weights came from.
        values.append(json.loads(json.dumps(timm.get_pretrained_cfg(config).to_dict())))
    else:
        if isinstance(config, PreTrainedConfig):
            config._name_or_path = "google/vit-base-patch16-224"
        values = [json.loads(config.to_json_string())]
    for value in values:
        assert list(public_files._local_paths(value, public_files.LABEL_KEYS)) == []


def test_weights_carry_nothing_else(server, folder):
    weights = folder / "model.safetensors"
    tensors = load_file(weights)
    for name, metadata in {
        "loss": {"format": "pt", "loss": "0.123"},
        "format": {"format": "of Mrs Miller"},
    }.items():
        save_file(tensors, weights, metadata=metadata)
        restate(folder)
        with pytest.raises(ValueError, match=f"{name} beside the weights"):
            hub.push_folder(folder, "scans")
    weights.write_bytes(b"no weights")
    restate(folder)
    with pytest.raises(ValueError, match="cannot be read"):
        hub.push_folder(folder, "scans")
    assert server.requests == []


def model_of(library: str) -> Any:
    """A model of three classes as each library saves it."""
    import timm

    names = ("a", "b", "c")
    if library == "builtin":
        return load_model("builtin:wrn-16-4", label_names=names)
    model = (
        timm.create_model("test_vit", num_classes=3)
        if library == "timm"
        else AutoModelForImageClassification.from_config(BEIT)
    )
    processor = ViTImageProcessor() if library == "transformers" else None
    return replace(as_loaded(model), library=library, processor=processor)


BEIT = BeitConfig(
    image_size=8,
    patch_size=4,
    hidden_size=8,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=8,
    num_labels=3,
    use_relative_position_bias=True,  # one of its own buffers
)


@pytest.mark.parametrize("library", ["transformers", "timm", "builtin"])
def test_a_tensor_that_the_architecture_does_not_have_stays(server, folder, library):
    loaded = model_of(library)
    inner = next(module for module in loaded.model.modules() if not list(module.children()))
    generator = torch.get_rng_state()

    def push() -> None:
        save_model(loaded, folder)
        restate(folder)
        hub.push_folder(folder, "scans")

    push()
    for module in (loaded.model, inner):
        module.register_buffer("cache", torch.ones(4, 3, 8, 8), persistent=False)
        push()
        sent = len(server.requests)
        module.register_buffer("cache", torch.ones(4, 3, 8, 8))
        with pytest.raises(ValueError, match=r"differ in the tensors \S*cache,.*persistent=False"):
            push()
        assert len(server.requests) == sent
        del module.cache
    assert torch.equal(torch.get_rng_state(), generator)
    config = json.loads((folder / "config.json").read_text())
    for name in ("model_type", "architecture"):
        if name in config:
            change(folder / "config.json", **{name: "of my own"})
            with pytest.raises(ValueError, match="cannot be compared with the architecture"):
                hub.push_folder(folder, "scans")


def test_nothing_but_regular_files_leaves(server, folder, tmp_path):
    for name in MODEL_FILES:
        path, elsewhere = folder / name, tmp_path / name
        path.rename(elsewhere)
        path.symlink_to(elsewhere)
        with pytest.raises(ValueError, match=f"{name} is no regular file"):
            hub.push_folder(folder, "scans")
        path.unlink()
        path.mkdir()
        with pytest.raises(ValueError, match=f"{name} is no regular file"):
            hub.push_folder(folder, "scans")
        path.rmdir()
        elsewhere.rename(path)
    assert server.requests == []
    hub.push_folder(folder, "scans")


def chunk(name: bytes, content: bytes) -> bytes:
    check = struct.pack(">I", zlib.crc32(name + content))
    return struct.pack(">I", len(content)) + name + content + check


def test_a_picture_is_pixels_alone(server, folder):
    path = folder / "epsilon.png"
    drawn = path.read_bytes()
    end = chunk(b"IEND", b"")
    assert drawn.endswith(end)
    hidden = [
        drawn.removesuffix(end) + chunk(name, b"Comment\0Mrs Miller") + end
        for name in (b"tEXt", b"zTXt", b"iTXt", b"eXIf", b"prVt")
    ]
    hidden += [drawn + b"Mrs Miller", drawn + drawn, drawn.removesuffix(end), b"Mrs Miller", b""]
    for content in hidden:
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"epsilon\.png is no PNG of pixels alone"):
            hub.push_folder(folder, "scans")
    assert server.requests == []


# ---- report, ledger, card and weights belong together ----


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def of_an_earlier_step(folder: Path, *names: str) -> None:
    for name in names:
        shutil.copy(folder / "checkpoint-2" / name, folder / name)


def take_a_step(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors[min(tensors)] += 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


MIX_UPS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "epsilon edited": (
        "epsilon=0.01 in the privacy report must be",
        lambda f: change(f / "privacy_report.json", epsilon=0.01),
    ),
    "a further key": (
        "is not a privacy report of this version",
        lambda f: change(f / "privacy_report.json", rows="P001"),
    ),
    "report and card of an earlier step": (
        "steps=2 in the privacy report|epsilon=.* in the privacy report",
        lambda f: of_an_earlier_step(f, "privacy_report.json", "README.md"),
    ),
    "all but the ledger of an earlier step": (
        "in the privacy report must be",
        lambda f: of_an_earlier_step(f, "privacy_report.json", "README.md", "model.safetensors"),
    ),
    "weights of an earlier step": (
        "weights='model.safetensors' in .* must be the file",
        lambda f: of_an_earlier_step(f, "model.safetensors"),
    ),
    "weights of a later step": ("must be the file that the privacy report", take_a_step),
    "weights not hashed": (
        "not stated",
        lambda f: change(f / "privacy_report.json", weights={}),
    ),
    "weights that are not there": (
        "it is missing",
        lambda f: change(
            f / "privacy_report.json", weights={**hash_weights(f), "x.safetensors": "0"}
        ),
    ),
    "a card of an earlier step": (
        "README.md does not state the guarantee",
        lambda f: of_an_earlier_step(f, "README.md"),
    ),
    "a card without its statement": (
        "README.md does not state the guarantee",
        lambda f: edit(f / "README.md", "differential privacy.**", "privacy.**"),
    ),
    "a card with a second statement": (
        "README.md does not state the guarantee",
        lambda f: edit(
            f / "README.md",
            "## Privacy\n",
            "## Privacy\n\nIt is (0.1, 0)-differentially private for each patient.\n",
        ),
    ),
    "a card without its tag": (
        "README.md does not state the guarantee",
        lambda f: edit(f / "README.md", "- differential-privacy\n", ""),
    ),
    "a card without metadata": (
        "README.md does not state the guarantee",
        lambda f: edit(f / "README.md", "---\n", ""),
    ),
}


@pytest.mark.parametrize("name", MIX_UPS)
def test_what_does_not_belong_together_stays(server, folder, name):
    message, mix_up = MIX_UPS[name]
    mix_up(folder)
    with pytest.raises(ValueError, match=message) as caught:
        hub.push_folder(folder, "scans")
    assert "\n" not in str(caught.value)
    assert server.requests == []


def test_a_voided_guarantee_cannot_be_claimed_beside_its_ledger(server, tmp_path):
    trainer = trainer_of(tmp_path / "seed", max_steps=1, noise_seed=7)
    trainer.train()
    trainer.save_model()
    change(tmp_path / "seed" / "privacy_report.json", guarantee=True)
    with pytest.raises(ValueError, match="guarantee=True in the privacy report must be False"):
        hub.push_folder(tmp_path / "seed", "scans")
    assert server.requests == []


def test_what_a_publisher_adds_to_the_card_is_pushed(server, folder):
    card = folder / "README.md"
    edit(card, "---\n", "---\nlanguage: en\n")
    edit(card, "## Limits", "## Use\n\nAsk Dr Weber.\n\n## Limits")
    hub.push_folder(folder, "scans")
    assert b"Ask Dr Weber" in server.repositories[REPOSITORY].files["README.md"]


@pytest.mark.parametrize("missing", ["privacy_report.json", "README.md", "config.json"])
def test_a_model_without_its_statement_stays(server, folder, missing):
    (folder / missing).unlink()
    with pytest.raises(ValueError, match=f"has no {missing}"):
        hub.push_folder(folder, "scans")
    assert server.requests == []


def test_a_model_without_a_guarantee_stays(server, tmp_path):
    for name, settings in {"seed": {"noise_seed": 7}, "sigma": {"noise_multiplier": 0.0}}.items():
        trainer = trainer_of(tmp_path / name, max_steps=1, **{"noise_seed": None, **settings})
        trainer.train()
        with pytest.raises(ValueError, match="without a guarantee of privacy"):
            trainer.push_to_hub()
    for name, sigma in {"next to none": 1e-5, "little": 1e-2}.items():
        trainer = trainer_of(tmp_path / name, max_steps=1, noise_multiplier=sigma, noise_seed=None)
        trainer.train()
        message = {
            "next to none": "without a guarantee of privacy",
            "little": r"protects nobody: epsilon=\d+\.\d{4} at .* by 100 % of the members",
        }[name]
        with pytest.raises(ValueError, match=message):
            trainer.push_to_hub()
    untrained = trainer_of(tmp_path / "untrained", noise_seed=None)
    with pytest.raises(ValueError, match="train first"):
        untrained.push_to_hub()
    assert server.requests == []


# ---- private by default ----


def test_a_repository_is_private_whichever_way_it_is_made(server, tmp_path, folder):
    trainer = trainer_of(tmp_path / "a", noise_seed=None, max_steps=1)
    trainer.train()
    trainer.push_to_hub()  # push_to_hub=False in the arguments
    trainer_of(tmp_path / "b", noise_seed=None, push_to_hub=True)
    trainer_of(tmp_path / "c", noise_seed=None, push_to_hub=True, hub_private_repo=None)
    hub.push_folder(folder, "d")
    assert hub.prepare_repository("e") == f"{USER}/e"
    assert set(server.repositories) == {f"{USER}/{name}" for name in "abcde"}
    assert all(repository.created_private for repository in server.repositories.values())
    hub.prepare_repository("f", private=False)
    assert not server.repositories[f"{USER}/f"].private


def test_an_existing_public_repository_is_refused_before_training(server, tmp_path, folder):
    server.add_model(REPOSITORY)
    with pytest.raises(hub.PublicRepositoryError, match="hub_private_repo=False"):
        trainer_of(tmp_path / "scans", noise_seed=None, push_to_hub=True)
    with pytest.raises(hub.PublicRepositoryError, match=REPOSITORY):
        hub.push_folder(folder, "scans")
    trainer = trainer_of(tmp_path / "other", noise_seed=None, max_steps=1, hub_model_id="scans")
    trainer.train()
    with pytest.raises(hub.PublicRepositoryError, match=REPOSITORY):
        trainer.push_to_hub()
    assert_nothing_sent(server)
    trainer.push_to_hub(private=False)
    assert set(server.uploaded[REPOSITORY]) == MODEL_FILES
    assert not server.repositories[REPOSITORY].private


def test_an_existing_private_repository_stays_private(server, folder):
    server.add_model(REPOSITORY, {"NOTES.md": b"of a colleague"}, private=True)
    hub.push_folder(folder, REPOSITORY, private=False)
    assert server.repositories[REPOSITORY].private
    assert server.repositories[REPOSITORY].files["NOTES.md"] == b"of a colleague"


def test_a_repository_that_becomes_public_during_the_upload_is_refused(server, folder, monkeypatch):
    upload = HfApi.preupload_lfs_files

    def and_publish(*args: Any, **kwargs: Any) -> None:
        upload(*args, **kwargs)
        server.repositories[REPOSITORY].private = False

    monkeypatch.setattr(HfApi, "preupload_lfs_files", and_publish)
    with pytest.raises(hub.PublicRepositoryError):
        hub.push_folder(folder, "scans")
    assert server.asked("POST", "/commit/") == 0
    assert server.repositories[REPOSITORY].messages == ["initial commit"]


def test_a_repository_that_becomes_public_with_the_commit_is_told(server, folder, monkeypatch):
    commit = HfApi.create_commit

    def publish_first(*args: Any, **kwargs: Any) -> Any:
        server.repositories[REPOSITORY].private = False
        return commit(*args, **kwargs)

    monkeypatch.setattr(HfApi, "create_commit", publish_first)
    message = f"became public while .* make it private now at {server.endpoint}/{REPOSITORY}/sett"
    with pytest.raises(hub.PublicRepositoryError, match=message):
        hub.push_folder(folder, "scans")
    assert set(server.uploaded[REPOSITORY]) == MODEL_FILES
    hub.push_folder(folder, "scans", private=False)


def test_a_checkpoint_that_cannot_be_pushed_does_not_stop_training(server, tmp_path, caplog):
    class Publish(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            server.repositories[REPOSITORY].private = state.global_step != 1

        def on_push_begin(self, args, state, control, **kwargs):
            checkpoint = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            complete.append((checkpoint / "privacy_state.json").is_file())

    complete: list[bool] = []
    trainer = trainer_of(
        tmp_path / "scans",
        noise_seed=None,
        push_to_hub=True,
        save_strategy="steps",
        save_steps=1,
        max_steps=2,
        callbacks=[Publish()],
    )
    trainer.train()
    assert "pushing a checkpoint failed" in caplog.text
    messages = server.repositories[REPOSITORY].messages
    assert messages == ["initial commit", "Training in progress, step 2"]
    assert complete == [True, True]  # a checkpoint is whole before it is pushed


def test_the_strategy_end_pushes_once(server, tmp_path):
    trainer = trainer_of(
        tmp_path / "scans",
        noise_seed=None,
        push_to_hub=True,
        hub_strategy="end",
        hub_revision="trial",
        save_strategy="steps",
        save_steps=2,
    )
    trainer.train()
    assert_nothing_sent(server)
    trainer.save_model()
    repository = server.repositories[REPOSITORY]
    assert repository.messages[1:] == ["Model save"]
    trainer.evaluate()
    trainer.push_to_hub()
    assert repository.messages[1:] == ["Model save", "End of training"]
    assert set(repository.trees[repository.refs["trial"]]) >= MODEL_FILES
    assert set(repository.files) == {".gitattributes"}  # main


def test_an_interrupted_run_pushes_nothing(server, tmp_path):
    class Interrupt(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 1:
                os.kill(os.getpid(), signal.SIGTERM)

    trainer = trainer_of(
        tmp_path / "scans", noise_seed=None, push_to_hub=True, callbacks=[Interrupt()]
    )
    trainer.train()
    assert trainer.interrupted
    assert (tmp_path / "scans" / "checkpoint-2").is_dir()
    assert_nothing_sent(server)


# ---- failures ----


@pytest.mark.parametrize("status", [500, 503, 429, None])
@pytest.mark.parametrize(
    "step",
    [("POST", "/repos/create"), ("GET", "/api/models/"), ("PUT", "/lfs/"), ("POST", "/comm")],
)
def test_a_failure_that_passes_is_overcome(server, folder, step, status):
    server.fail_next(*step, status=status, times=2)
    hub.push_folder(folder, "scans")
    assert server.asked(*step) >= 3
    assert server.repositories[REPOSITORY].messages[1:] == ["Upload a privately fine-tuned model"]
    assert set(server.repositories[REPOSITORY].files) >= MODEL_FILES


def test_a_commit_whose_answer_was_lost_is_not_lost(server, folder):
    server.fail_next("POST", "/commit/", after=True)
    hub.push_folder(folder, "scans")
    files = server.repositories[REPOSITORY].files
    assert {name: files[name] for name in MODEL_FILES} == {
        name: (folder / name).read_bytes() for name in MODEL_FILES
    }


def test_a_lasting_failure_is_one_sentence_and_the_folder_can_be_pushed_again(
    server, folder, monkeypatch
):
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    before = bytes_of(folder)
    server.fail_next("POST", "/commit/", times=4)
    with pytest.raises(ValueError, match="push_folder") as caught:
        hub.push_folder(folder, "scans")
    assert waits == [1.0, 2.0, 4.0]
    assert str(caught.value).count("\n") == 0
    assert str(folder) in str(caught.value)
    assert bytes_of(folder) == before
    assert server.repositories[REPOSITORY].messages == ["initial commit"]
    hub.push_folder(folder, "scans")
    assert set(server.repositories[REPOSITORY].files) >= MODEL_FILES


def test_metadata_that_the_hub_refuses_is_one_sentence(server, folder):
    card = folder / "README.md"
    edit(card, "---\n", "---\nlanguage: 3\n")
    with pytest.raises(ValueError, match=r'Invalid metadata in README.*"language" must be an arr'):
        hub.push_folder(folder, "scans")
    assert server.asked("POST", "/commit/") == 0


def test_without_token_network_or_permission_training_does_not_start(server, tmp_path, monkeypatch):
    def start(**settings: Any) -> str:
        with pytest.raises(ValueError) as caught:
            trainer_of(tmp_path / "scans", noise_seed=None, push_to_hub=True, **settings)
        assert not (tmp_path / "scans").exists()
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "hf auth login" in start(hub_token=READ_TOKEN)
    assert "hf auth login" in start(hub_token="hf_unknown")
    assert "hf auth login" in start(hub_model_id="someone-else/scans")
    assert "hub_model_id" in start(hub_model_id="a/b/c")
    monkeypatch.delenv("HF_TOKEN")
    asked = len(server.requests)
    assert "set HF_TOKEN" in start()
    assert len(server.requests) == asked
    trainer_of(tmp_path / "with-token", noise_seed=None, push_to_hub=True, hub_token=TOKEN)
    shutil.rmtree(tmp_path / "with-token")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE=0" in start()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{closed.getsockname()[1]}")
        assert "check the network" in start()


# ---- several processes, and the command line ----


def test_of_two_processes_one_pushes_and_both_hear_a_refusal(server, tmp_path):
    server.add_model(f"{USER}/public")

    def work(rank: int) -> tuple[str, str | None]:
        with pytest.raises(hub.PublicRepositoryError) as caught:
            trainer_of(tmp_path / "public", noise_seed=None, push_to_hub=True)
        trainer = trainer_of(tmp_path / "scans", noise_seed=None, push_to_hub=True, max_steps=1)
        trainer.train()
        commit = trainer.push_to_hub()
        assert (commit is not None) == (rank == 0)
        return str(caught.value), trainer.hub_model_id

    first, second = in_processes(2, work)
    assert first == second
    assert first[1] == REPOSITORY
    assert server.repositories[REPOSITORY].messages[1:] == ["End of training"]


def test_the_command_pushes_or_says_in_one_sentence_why_not(server, tmp_path):
    options = (
        *("--config=configs/quickstart.yaml", "--max_steps=1", "--logical_batch_size=32"),
        *("--use_cpu", "--push_to_hub"),
    )
    server.add_model(f"{USER}/public")
    done = script(*options, f"--output_dir={tmp_path / 'public'}")
    assert done.returncode == 2
    (sentence,) = [line for line in done.stderr.splitlines() if line.startswith("finetune_vit")]
    assert f"{USER}/public' is public" in sentence
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "public").exists()
    assert_nothing_sent(server)
    server.fail_next("POST", "/commit/", status=403)
    done = script(*options, f"--output_dir={tmp_path / 'digits'}")
    assert done.returncode == 2
    (sentence,) = [line for line in done.stderr.splitlines() if line.startswith("finetune_vit")]
    assert "push_folder" in sentence
    assert "hf auth login" in sentence
    assert "Traceback" not in done.stderr
    assert server.uploaded == {}
    hub.push_folder(tmp_path / "digits", "digits")
    assert set(server.uploaded[f"{USER}/digits"]) == MODEL_FILES | {"preprocessor_config.json"}
