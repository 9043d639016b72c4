"""A classifier of HF, of timm or from scratch, its head fitted to the labels, checked for DP.

Receives the name of a model and the class names of the data. Returns the model in fp32, what its
images must look like, and, for any model, the role of each of its parameters.

Guarantees:
    * Every weight that the forward pass reads is pretrained, except those of the classifier head
      (and a position table that was resized once, which a note says); or every weight is random,
      in the built-in networks that are trained from scratch, which a note says too.
    * What was frozen, converted, resized or left out is in `LoadedModel.notes`.
    * A saved folder loads with no missing and no unexpected key and gives equal logits, through
      `from_pretrained` or `timm.create_model`, and its processor prepares images as
      `hf_dpmuon.data.build_transforms` did. A `ResidualNetwork` loads through `load_model` alone.
"""

import copy
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from enum import Enum
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HFValidationError
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForImageClassification,
    BaseImageProcessor,
    PreTrainedModel,
)

from hf_dpmuon.adapters import adapter_problems, merged
from hf_dpmuon.data import ImageFormat
from hf_dpmuon.networks import ARCHITECTURES, ResidualNetwork

__all__ = [
    "LoadedModel",
    "load_model",
    "save_model",
    "set_activation_checkpointing",
    "unlike_architecture",
    "ties_written_out",
    "validate_model",
    "ParameterRole",
    "parameter_roles",
]

BUILTIN_MODELS = {
    "builtin:tiny-vit": Path(__file__).parent / "pretrained" / "tiny-vit-fashion-mnist"
}
REPORT_FILE = "privacy_report.json"
NF_RESNET = "builtin:nf-resnet-50"
# Side of their images, by default. The stem of NF-ResNet-50 is that of ImageNet.
SIZES_FROM_SCRATCH = {**dict.fromkeys(ARCHITECTURES, 32), NF_RESNET: 224}


@dataclass(frozen=True)
class LoadedModel:
    """A classifier and what belongs to it.

    Attributes:
        model: A plain `PreTrainedModel`, timm module or `ResidualNetwork`, in fp32.
        image_format: What its images must look like.
        processor: The same for HF's `pipeline`; the others keep it in their configuration.
        library: Where the model comes from, and how it is saved.
        label_names: Class names by output.
        notes: What was changed on loading, for the user.
        multi_label: Whether an image may have several labels or none, each with its own logit.
        report_file: The privacy report that came with the weights, if there was one.
    """

    model: nn.Module
    image_format: ImageFormat
    processor: BaseImageProcessor | None
    library: Literal["transformers", "timm", "hf_dpmuon"]
    label_names: tuple[str, ...]
    notes: tuple[str, ...]
    multi_label: bool = False
    report_file: Path | None = None


def load_model(
    name_or_path: str,
    *,
    label_names: tuple[str, ...],
    multi_label: bool = False,
    image_size: int | None = None,
    revision: str | None = None,
) -> LoadedModel:
    """Load a pretrained classifier and fit its head to the labels, or make one with random weights.

    The head is kept when its class names are already `label_names`. Otherwise it is new, with
    the default initialisation of its library, drawn from torch's global generator.

    Args:
        name_or_path: One of

            * a Hub id, or a local folder that a library or `save_model` wrote;
            * `timm/<name>`, or `timm/<owner>/<repository>` for a timm model on the Hub;
            * `builtin:tiny-vit`, small and pretrained;
            * `builtin:wrn-16-4`, `builtin:wrn-28-10` or `builtin:resnet-18-gn` (residual networks
              with group norms, for images of about 32 pixels), or `builtin:nf-resnet-50` (timm's,
              without norms, for images of about 224 pixels): random weights, to be trained from
              scratch.
        label_names: Class names by label; at least two, or one where `multi_label`.
        multi_label: Whether each label is a question of its own, answered by a sigmoid.
        image_size: Side of the square images; by default that of the model's own processor. The
            position table is resized once, at load. A network from scratch takes any size.
        revision: Branch, tag or commit of a Hub repository of HF.

    Raises:
        ValueError: The model cannot be found, is no image classifier, lacks pretrained weights
            outside its head, or cannot take images of this size.
    """
    if len(label_names) < (1 if multi_label else 2) or len(set(label_names)) != len(label_names):
        fewest = "one" if multi_label else "two"
        raise ValueError(f"label_names={label_names!r} must be {fewest} or more different names.")
    if image_size is not None and image_size < 1:
        raise ValueError(f"image_size={image_size} must be at least 1.")
    loaded = _load(name_or_path, label_names, image_size, revision)
    if isinstance(loaded.model, PreTrainedModel):  # what `pipeline` goes by
        loaded.model.config.problem_type = (
            "multi_label_classification" if multi_label else "single_label_classification"
        )
    report_file = _report_beside(name_or_path.removeprefix("timm/"), revision)
    return replace(loaded, multi_label=multi_label, report_file=report_file)


def save_model(loaded: LoadedModel, folder: str | Path) -> None:
    """Write the weights, their configuration and the image processor, in the library's own form.

    A `ResidualNetwork` is written as `config.json` and `model.safetensors`.

    Args:
        loaded: Its `model` may have been trained since it was loaded.
        folder: Made if it does not exist.
    """
    plain = replace(loaded, model=merged(loaded.model))
    with ties_written_out(plain.model):
        _save(plain, folder)


@contextmanager
def ties_written_out(model: nn.Module) -> Iterator[None]:
    """Let a parameter that has several names be saved under each, which files keep apart."""

    def write_out(_module: nn.Module, state: dict[str, Any], *_: Any) -> None:
        seen: set[int] = set()
        for name, value in state.items():
            if isinstance(value, Tensor) and value.numel():
                if value.data_ptr() in seen:
                    state[name] = value.clone()
                seen.add(value.data_ptr())

    handle = model.register_state_dict_post_hook(write_out)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        handle.remove()


def _save(loaded: LoadedModel, folder: str | Path) -> None:
    if isinstance(loaded.model, PreTrainedModel):
        assert loaded.processor is not None
        loaded.model.save_pretrained(folder)
        loaded.processor.save_pretrained(folder)
        return
    if isinstance(loaded.model, ResidualNetwork):
        _save_residual_network(loaded, loaded.model, Path(folder))
        return
    from timm.models import save_for_hf

    image_format = loaded.image_format
    save_for_hf(
        loaded.model,
        str(folder),
        model_config={"label_names": list(loaded.label_names)},
        safe_serialization=True,
        data_config={
            "input_size": (image_format.num_channels, image_format.height, image_format.width),
            "mean": image_format.mean,
            "std": image_format.std,
            "interpolation": image_format.interpolation,
            "crop_pct": 1.0,
            "crop_mode": "squash",
        },
    )


def unlike_architecture(folder: Path, found: set[str]) -> set[str]:
    """Return the tensors that a folder's files or its architecture have alone; nothing is loaded.

    Args:
        folder: It holds a configuration, which anybody may have written.
        found: The names of the tensors in its files.
    """
    config = _stored_config(str(folder))
    if "architecture" in config:
        import timm

        settings = {"num_classes": config["num_classes"], **config.get("model_args", {})}
        with torch.device("meta"):
            return found ^ set(timm.create_model(config["architecture"], **settings).state_dict())
    if "residual_network" in config:
        with torch.device("meta"):
            network = ResidualNetwork(
                config["residual_network"],
                num_classes=len(config["label_names"]),
                num_channels=config["image_format"]["num_channels"],
            )
        return found ^ set(network.state_dict())
    # Loaded and not compared, since transformers renames tensors when it saves them.
    _, info = AutoModelForImageClassification.from_pretrained(
        folder,
        device_map="meta",
        use_safetensors=True,
        local_files_only=True,
        trust_remote_code=False,
        output_loading_info=True,
    )
    return {*info["unexpected_keys"], *info["missing_keys"]}


# Loading


def _load(
    name_or_path: str, label_names: tuple[str, ...], image_size: int | None, revision: str | None
) -> LoadedModel:
    if name_or_path in SIZES_FROM_SCRATCH:
        return _from_scratch(name_or_path, label_names, image_size)
    if name_or_path.startswith("builtin:"):
        if name_or_path not in BUILTIN_MODELS:
            known = ", ".join([*BUILTIN_MODELS, *SIZES_FROM_SCRATCH])
            raise ValueError(f"{name_or_path!r} is unknown; use {known}.")
        name_or_path = str(BUILTIN_MODELS[name_or_path])
    config = _stored_config(name_or_path)
    if "residual_network" in config:
        return _load_residual_network(name_or_path, config, label_names, image_size)
    if "architecture" in config or name_or_path.startswith("timm/"):  # HF writes "architectures"
        return _load_timm(name_or_path, label_names, image_size)
    return _load_transformers(name_or_path, label_names, image_size, revision)


def _report_beside(name: str, revision: str | None) -> Path | None:
    """Find what a private training of these very weights stated, in a folder or on the Hub."""
    if Path(name).is_dir():
        path = Path(name) / REPORT_FILE
        return path if path.is_file() else None
    if name.count("/") != 1:
        return None  # a model of this package or of timm, trained on public data
    try:
        return Path(hf_hub_download(name, REPORT_FILE, revision=revision))
    except (EntryNotFoundError, HFValidationError):
        return None


def _stored_config(name_or_path: str) -> dict[str, Any]:
    """Return the configuration in a local folder; empty where there is none."""
    path = Path(name_or_path) / "config.json"
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


def _not_found(name: str, error: Exception) -> ValueError:
    reason = str(error).strip().splitlines()[0].rstrip(".")
    return ValueError(
        f"model {name!r} cannot be loaded; check its spelling, your permission and the network, "
        f"or give a local folder with its weights and image processor ({reason})."
    )


def _load_transformers(
    name: str, label_names: tuple[str, ...], image_size: int | None, revision: str | None
) -> LoadedModel:
    try:
        config = AutoConfig.from_pretrained(name, revision=revision)
        if config.model_type == "timm_wrapper":
            raise ValueError(f"it is a timm model: name it timm/{name}")
        if "num_channels" not in config.to_dict():
            raise ValueError(f"models of type {config.model_type} are not supported: use a ViT")
        processor = AutoImageProcessor.from_pretrained(name, revision=revision)
        stored_names = tuple(config.id2label[label] for label in range(config.num_labels))
        stored_dtype = config.dtype
        config.id2label = dict(enumerate(label_names))
        config.label2id = {label_name: label for label, label_name in enumerate(label_names)}
        model, info = AutoModelForImageClassification.from_pretrained(
            name,
            config=config,
            revision=revision,
            dtype=torch.float32,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, SafetensorError) as error:
        raise _not_found(name, error) from error

    notes = []
    if stored_dtype not in (None, torch.float32):
        notes.append(f"the weights are stored as {stored_dtype} and were converted to fp32")
    image_format = _processor_format(
        processor.to_dict(), num_channels=config.num_channels, image_size=image_size
    )
    processor = _matching_processor(processor, image_format)
    if _sides(config.image_size) != (image_format.height, image_format.width):
        notes.append(
            f"made for images of {_sides(config.image_size)} pixels, refitted once to "
            f"{(image_format.height, image_format.width)}"
        )
        model = _resize_positions(model, name, image_format)
    notes += _freeze_unread(model, image_format)

    head = _head_parameters(model)
    new = set(info["missing_keys"]) | {key for key, *_ in info["mismatched_keys"]}
    unread = {key for key, p in model.named_parameters() if not p.requires_grad}
    lacking = sorted(new - head - unread)
    if not head or lacking:
        raise ValueError(
            f"model {name!r} lacks pretrained weights for {', '.join(lacking) or 'a head'}; use a "
            "checkpoint of which only the classifier head may be new."
        )
    if head & new:
        notes.append(f"the head is new ({len(label_names)} classes)")
    elif stored_names != label_names:  # as many classes, but other ones
        fresh = type(model)(model.config).state_dict()
        model.load_state_dict({key: fresh[key] for key in head}, strict=False)
        notes.append(f"the head is new ({len(label_names)} classes)")
    if info["unexpected_keys"]:
        notes.append("stored but not part of the classifier: " + _listed(info["unexpected_keys"]))
    return LoadedModel(
        model=model,
        image_format=image_format,
        processor=processor,
        library="transformers",
        label_names=label_names,
        notes=tuple(notes),
    )


def _load_timm(name: str, label_names: tuple[str, ...], image_size: int | None) -> LoadedModel:
    import timm

    source = f"local-dir:{name}" if Path(name).is_dir() else name.removeprefix("timm/")
    if "/" in source and not Path(name).is_dir():
        source = f"hf-hub:{source}"
    # Loaded with its own head first: timm is strict about missing weights only then.
    size = {} if image_size is None else {"img_size": image_size}
    try:
        model = timm.create_model(source, pretrained=True, **size)
    except TypeError as error:
        raise ValueError(
            f"image_size={image_size} cannot be set for the timm model {name!r}; leave it out."
        ) from error
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        raise _not_found(name, error) from error

    _work_out_of_place(model)
    notes = []
    dtypes = {p.dtype for p in model.parameters()} - {torch.float32}
    if dtypes:
        notes.append(f"weights stored as {_listed(map(str, dtypes))} were converted to fp32")
        model.float()
    if tuple(model.pretrained_cfg.get("label_names") or ()) != label_names:
        model.reset_classifier(len(label_names))
        notes.append(f"the head is new ({len(label_names)} classes)")
    wanted = timm.data.resolve_model_data_config(model)
    channels, height, width = wanted["input_size"]
    if image_size is not None and (height, width) != (image_size, image_size):
        notes.append(
            f"made for images of {(height, width)} pixels, refitted once to "
            f"{(image_size, image_size)}"
        )
        height = width = image_size
    image_format = ImageFormat(
        height=height,
        width=width,
        num_channels=channels,
        mean=tuple(wanted["mean"]),
        std=tuple(wanted["std"]),
        interpolation=wanted["interpolation"],
    )
    notes += _freeze_unread(model, image_format)
    return LoadedModel(
        model=model,
        image_format=image_format,
        processor=None,
        library="timm",
        label_names=label_names,
        notes=tuple(notes),
    )


def _work_out_of_place(model: nn.Module) -> None:
    """Make activations write to new tensors, since Opacus' hooks refuse what is overwritten."""
    for module in model.modules():
        if "inplace" in vars(module):
            vars(module)["inplace"] = False


def _from_scratch(name: str, label_names: tuple[str, ...], image_size: int | None) -> LoadedModel:
    side = SIZES_FROM_SCRATCH[name] if image_size is None else image_size
    # Not the statistics of any data: those of private images would not be covered by epsilon.
    image_format = ImageFormat(
        height=side,
        width=side,
        num_channels=3,
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
        interpolation="bicubic",
    )
    model: nn.Module
    if name == NF_RESNET:
        import timm

        # What timm knows of its pretrained weights is not true of these.
        sources = dict.fromkeys(("tag", "url", "hf_hub_id", "license"), "")
        model = timm.create_model(
            "nf_resnet50", num_classes=len(label_names), pretrained_cfg_overlay=sources
        )
        _work_out_of_place(model)
    else:
        model = ResidualNetwork(name, num_classes=len(label_names))
    return LoadedModel(
        model=model,
        image_format=image_format,
        processor=None,
        library="timm" if name == NF_RESNET else "hf_dpmuon",
        label_names=label_names,
        notes=(f"{name} is not pretrained: all its weights are random",),
    )


def _save_residual_network(loaded: LoadedModel, network: ResidualNetwork, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "residual_network": network.architecture_name,
        "label_names": loaded.label_names,
        "image_format": asdict(loaded.image_format),
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(network.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})


def _load_residual_network(
    name: str, config: Mapping[str, Any], label_names: tuple[str, ...], image_size: int | None
) -> LoadedModel:
    stored_names = tuple(config["label_names"])
    values = config["image_format"]
    values = {**values, "mean": tuple(values["mean"]), "std": tuple(values["std"])}
    if image_size is not None:
        values |= {"height": image_size, "width": image_size}
    image_format = ImageFormat(**values)
    try:
        network = ResidualNetwork(
            config["residual_network"],
            num_classes=len(stored_names),
            num_channels=image_format.num_channels,
        )
        network.load_state_dict(load_file(Path(name) / "model.safetensors"))
    except (KeyError, OSError, RuntimeError, SafetensorError) as error:
        raise _not_found(name, error) from error
    notes = []
    if stored_names != label_names:
        network.head = nn.Linear(network.head.in_features, len(label_names))
        notes.append(f"the head is new ({len(label_names)} classes)")
    return LoadedModel(
        model=network,
        image_format=image_format,
        processor=None,
        library="hf_dpmuon",
        label_names=label_names,
        notes=tuple(notes),
    )


def _sides(size: int | tuple[int, int] | list[int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def _listed(names: Any) -> str:
    return ", ".join(sorted(names))


def _processor_format(
    facts: Mapping[str, Any], *, num_channels: int, image_size: int | None
) -> ImageFormat:
    """Read an image format off the configuration of an HF image processor."""
    size = facts["crop_size"] if facts.get("do_center_crop") else facts["size"]
    if image_size is not None:
        height = width = image_size
    elif "height" in size:
        height, width = size["height"], size["width"]
    else:
        height = width = size["shortest_edge"]
    if not facts.get("do_rescale") or abs(facts["rescale_factor"] * 255 - 1) > 1e-6:
        raise ValueError(
            "the model's image processor does not scale pixels to [0, 1]; set its do_rescale to "
            "true and its rescale_factor to 1/255."
        )
    normalises = facts.get("do_normalize")
    return ImageFormat(
        height=height,
        width=width,
        num_channels=num_channels,
        mean=tuple(facts["image_mean"]) if normalises else (0.0,) * num_channels,
        std=tuple(facts["image_std"]) if normalises else (1.0,) * num_channels,
        interpolation=Image.Resampling(facts["resample"]).name.lower(),
    )


def _matching_processor(
    processor: BaseImageProcessor, image_format: ImageFormat
) -> BaseImageProcessor:
    """Return a processor that resizes to the image format, without cropping edges away."""
    size = {"height": image_format.height, "width": image_format.width}
    matching: BaseImageProcessor = type(processor).from_dict(
        {**processor.to_dict(), "do_resize": True, "size": size, "do_center_crop": False}
    )
    return matching


@runtime_checkable
class _InterpolatesPositions(Protocol):
    """The embeddings of HF's vision transformers."""

    position_embeddings: Tensor | None

    def interpolate_pos_encoding(self, embeddings: Tensor, height: int, width: int) -> Tensor: ...


def _resize_positions(
    model: PreTrainedModel, name: str, image_format: ImageFormat
) -> PreTrainedModel:
    """Return the model for another image size, its position table interpolated by its own rule.

    Done once, so that the table is an ordinary parameter in training.
    """
    config = copy.deepcopy(model.config)
    sides = (image_format.height, image_format.width)
    config.image_size = sides[0] if sides[0] == sides[1] else list(sides)
    resized: PreTrainedModel = type(model)(config)
    expected, state = resized.state_dict(), model.state_dict()
    for path, module in model.named_modules():
        if isinstance(module, _InterpolatesPositions) and module.position_embeddings is not None:
            key = f"{path}.position_embeddings"
            tokens = torch.empty_like(expected[key])  # only its shape is read
            state[key] = module.interpolate_pos_encoding(tokens, *sides).detach()
    unfit = [key for key in expected if state[key].shape != expected[key].shape]
    if unfit:
        raise ValueError(
            f"image_size={sides[0]} does not fit model {name!r}, whose {_listed(unfit)} are made "
            f"for {_sides(model.config.image_size)[0]}; use that size."
        )
    resized.load_state_dict(state)
    return resized


def _freeze_unread(model: nn.Module, image_format: ImageFormat) -> list[str]:
    """Freeze parameters that the logits do not depend on, such as an unused mask token."""
    shape = (image_format.num_channels, image_format.height, image_format.width)
    parameters = dict(model.named_parameters())
    model.eval()
    output = model(torch.zeros(1, *shape))
    logits = output if isinstance(output, Tensor) else output.logits
    gradients = torch.autograd.grad(logits.sum(), list(parameters.values()), allow_unused=True)
    unread = [
        name for name, gradient in zip(parameters, gradients, strict=True) if gradient is None
    ]
    for name in unread:
        parameters[name].requires_grad_(False)
    return [f"frozen, since classification never reads them: {_listed(unread)}"] if unread else []


@runtime_checkable
class _Checkpoints(Protocol):
    """What timm's models answer."""

    def set_grad_checkpointing(self, enable: bool = True) -> None: ...


def set_activation_checkpointing(model: nn.Module, enable: bool) -> None:
    """Recompute activations in the backward pass, or no longer, in a model that is not HF's.

    Raises:
        ValueError: If the model does not know how.
    """
    try:
        if not isinstance(model, _Checkpoints):
            raise AssertionError
        model.set_grad_checkpointing(enable)
    except (AssertionError, NotImplementedError):
        raise ValueError(
            f"activation_checkpointing=True: {type(model).__name__} does not know how to "
            "recompute activations; leave it out, or use grad_sample_mode='ghost' to save memory."
        ) from None


# Validation


def validate_model(model: nn.Module) -> None:
    """Refuse a model of which not every trainable parameter can be clipped and noised.

    What needs a batch to be seen (parameters off the forward path, samples coupled by the loss,
    buffers that a custom layer updates) is left to the trainer.

    Raises:
        ValueError: All problems at once, each with what to do instead.
    """
    problems = [*_module_problems(model), *_parameter_problems(model)]
    if problems:
        raise ValueError("the model cannot be trained privately: " + "; ".join(problems) + ".")


def _module_problems(model: nn.Module) -> Iterator[str]:
    modules = dict(model.named_modules())

    def paths(kinds: tuple[type[nn.Module], ...]) -> list[str]:
        return [path or "(root)" for path, module in modules.items() if isinstance(module, kinds)]

    if any(
        "_orig_mod" in path.split(".") or module._compiled_call_impl is not None
        for path, module in modules.items()
    ):
        yield "it was compiled, which bypasses per-sample hooks: pass it uncompiled"
    wrapped = paths((nn.DataParallel, nn.parallel.DistributedDataParallel))
    if wrapped:
        yield f"{_listed(wrapped)} is wrapped for data parallelism: pass the module inside"
    norms = paths((nn.modules.batchnorm._BatchNorm,))
    if norms:
        yield (
            f"BatchNorm mixes samples in {_listed(norms)}: replace it by GroupNorm (as "
            "builtin:resnet-18-gn has it), or freeze it (torchvision.ops.FrozenBatchNorm2d)"
        )
    yield from adapter_problems(model)
    updated = [
        path
        for path, module in modules.items()
        if (
            isinstance(module, nn.modules.instancenorm._InstanceNorm) and module.track_running_stats
        )
        or isinstance(module, nn.utils.parametrizations._SpectralNorm)
    ]
    if updated:
        yield (
            f"training updates buffers of {_listed(updated)} with raw statistics: remove spectral "
            "norms and set track_running_stats=False"
        )


def _parameter_problems(model: nn.Module) -> Iterator[str]:
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trainable:
        yield "no parameter is trainable: call requires_grad_(True) on those to train"
    strange = [
        name for name, p in trainable.items() if p.is_complex() or p.layout is not torch.strided
    ]
    if strange:
        yield f"{_listed(strange)} are complex or sparse: make them real and dense, or freeze them"
    narrow = [
        f"{name} ({p.dtype})"
        for name, p in trainable.items()
        if p.dtype not in (torch.float32, torch.float64) and name not in strange
    ]
    if narrow:
        yield f"{_listed(narrow)} are not fp32: call model.float() and use bf16=True for speed"
    placed = sorted(
        (p.data_ptr(), p.nbytes, name)
        for name, p in trainable.items()
        if not p.is_meta and p.layout is torch.strided
    )
    shared = [
        f"{name} and {other}"
        for (start, size, name), (next_start, _, other) in pairwise(placed)
        if start + size > next_start
    ]
    if shared:
        yield f"{_listed(shared)} share memory, but are two parameters: assign one to both modules"
    absent = [name for name, p in model.named_parameters() if p.is_meta]
    if absent:
        yield f"{_listed(absent)} have no storage (meta device): load the weights first"


# Roles


class ParameterRole(str, Enum):
    """What a parameter is to the model, which decides how its gradient is used."""

    MATRIX = "matrix"  # weight of a linear layer
    FUSED_QKV = "fused_qkv"  # three matrices in one, stacked along the outputs
    FUSED_PAIR = "fused_pair"  # two: key and value, or query and key
    CONV = "conv"  # weight of a convolution
    PATCH_EMBEDDING = "patch_embedding"  # the convolution that reads the image, with its bias
    HEAD = "head"  # the linear layers that give the logits, with their biases
    EMBEDDING = "embedding"  # class and other tokens, position tables
    SCALE = "scale"  # LayerScale, and the gains of convolutions with standardised weights
    NORM = "norm"
    BIAS = "bias"


# How many matrices a parameter stacks.
BLOCKS = {ParameterRole.FUSED_QKV: 3, ParameterRole.FUSED_PAIR: 2}


@runtime_checkable
class _HasClassifier(Protocol):
    """What every timm model answers."""

    def get_classifier(self) -> nn.Module | tuple[nn.Module, ...]: ...


CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def parameter_roles(model: nn.Module) -> dict[str, ParameterRole]:
    """Return the role of every parameter, by the type and place of the module that owns it.

    A module that is neither of HF nor of timm has no head: its linear layers are matrices. A
    parameter of two or more dimensions that belongs to none of torch's layers is an embedding.
    """
    heads = _head_layers(model)
    stem = next((module for module in model.modules() if isinstance(module, CONVOLUTIONS)), None)
    fused = {
        child: role
        for module in model.modules()
        for child_name, child in module.named_children()
        if isinstance(child, nn.Linear) and (role := _fused_role(child_name, child))
    }
    roles = {}
    for path, module in model.named_modules():
        for name, p in module.named_parameters(recurse=False):
            if module in heads:
                role = ParameterRole.HEAD
            elif module is stem and not _is_gain(name, p):
                role = ParameterRole.PATCH_EMBEDDING
            elif module in fused and p.ndim == 2:
                role = fused[module]
            else:
                role = _role_in(module, name, p)
            roles[f"{path}.{name}" if path else name] = role
    return {name: roles[name] for name, _ in model.named_parameters()}


def _role_in(module: nn.Module, name: str, p: nn.Parameter) -> ParameterRole:
    """Return the role of a parameter that its owner's type alone decides."""
    if isinstance(module, NORMS):
        return ParameterRole.NORM
    if isinstance(module, nn.MultiheadAttention) and name == "in_proj_weight":
        return ParameterRole.FUSED_QKV
    if isinstance(module, CONVOLUTIONS) and _is_gain(name, p):
        return ParameterRole.SCALE
    if p.ndim >= 2:
        if isinstance(module, nn.Linear):
            return ParameterRole.MATRIX
        return ParameterRole.CONV if isinstance(module, CONVOLUTIONS) else ParameterRole.EMBEDDING
    weight = dict(module.named_parameters(recurse=False)).get("weight")
    if weight is not None and weight.ndim == 1:  # a norm that timm or HF wrote itself
        return ParameterRole.NORM
    return ParameterRole.BIAS if name.endswith("bias") else ParameterRole.SCALE


def _fused_role(name: str, layer: nn.Linear) -> ParameterRole | None:
    """Return what a linear layer of timm's attentions holds, by its name and its size."""
    pair = name in ("kv", "qk") or (name == "qkv" and layer.out_features == 2 * layer.in_features)
    if pair and layer.out_features % 2 == 0:
        return ParameterRole.FUSED_PAIR
    whole = name == "qkv" and layer.out_features % 3 == 0
    return ParameterRole.FUSED_QKV if whole else None


def _is_gain(name: str, p: nn.Parameter) -> bool:
    """Whether a convolution with this parameter scales its weight by it, an entry an output."""
    return name != "weight" and p.ndim >= 2 and p.numel() == len(p)


def _head_layers(model: nn.Module) -> set[nn.Module]:
    """Return the linear layers that turn features into logits."""
    if isinstance(model, PreTrainedModel):
        for child in model.children():
            if isinstance(child, _HasClassifier):  # timm's model, in HF's wrapper of it
                return _head_layers(child)
        if model.base_model is model:
            return set()
        outside = set(model.modules()) - set(model.base_model.modules())
    elif isinstance(model, _HasClassifier):
        classifier = model.get_classifier()
        heads = classifier if isinstance(classifier, tuple) else (classifier,)
        outside = {module for head in heads for module in head.modules()}
    else:
        outside = set()
    return {module for module in outside if isinstance(module, nn.Linear)}


def _head_parameters(model: nn.Module) -> set[str]:
    return {name for name, role in parameter_roles(model).items() if role is ParameterRole.HEAD}
