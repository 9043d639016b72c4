"""A classifier of HF, of timm or from scratch, its head fitted to the labels.

Receives the name of a model and the class names of the data. Returns the model in fp32, and what
its images must look like.

Guarantees:
    * Every weight that the forward pass reads is pretrained, except those of the classifier head
      (and a position table that was resized once, which a note says); or every weight is random,
      in the built-in networks that are trained from scratch, which a note says too.
    * What was frozen, converted, resized or left out is in `LoadedModel.notes`.
    * A saved folder loads with no missing and no unexpected key and gives equal logits, through
      `from_pretrained` or `timm.create_model`, and its processor prepares images as
      `hf_dpmuon.data.build_transforms` did. timm knows the networks of this package once
      `hf_dpmuon.networks` is imported.
"""

import copy
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from PIL import Image
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForImageClassification,
    BaseImageProcessor,
    PreTrainedModel,
)

from hf_dpmuon.adapters import merged
from hf_dpmuon.data import ImageFormat
from hf_dpmuon.roles import head_parameters

__all__ = [
    "LoadedModel",
    "load_model",
    "save_model",
    "ties_written_out",
    "unlike_architecture",
]

BUILTIN_MODELS = {
    "builtin:tiny-vit": Path(__file__).parent / "pretrained" / "tiny-vit-fashion-mnist"
}
# What timm calls them, and the side of their images by default.
FROM_SCRATCH = {
    "builtin:wrn-16-4": ("hf_dpmuon_wrn_16_4", 32),
    "builtin:wrn-28-10": ("hf_dpmuon_wrn_28_10", 32),
    "builtin:resnet-18-gn": ("hf_dpmuon_resnet_18_gn", 32),
    "builtin:nf-resnet-50": ("nf_resnet50", 224),
}


@dataclass(frozen=True)
class LoadedModel:
    """A classifier and what belongs to it.

    Attributes:
        model: A plain `PreTrainedModel` or timm module, in fp32.
        image_format: What its images must look like.
        processor: The same for HF's `pipeline`; timm keeps it in the configuration.
        library: Where the model comes from, and how it is saved.
        label_names: Class names by output.
        notes: What was changed on loading, for the user.
        multi_label: Whether an image may have several labels or none, each with its own logit.
        source: The folder or the repository of the Hub that it was loaded from.
        revision: That of that repository.
    """

    model: nn.Module
    image_format: ImageFormat
    processor: BaseImageProcessor | None
    library: Literal["transformers", "timm"]
    label_names: tuple[str, ...]
    notes: tuple[str, ...]
    multi_label: bool = False
    source: str = ""
    revision: str | None = None


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
    return replace(loaded, multi_label=multi_label, source=name_or_path, revision=revision)


def save_model(loaded: LoadedModel, folder: str | Path) -> None:
    """Write the weights, their configuration and the image processor, in the library's own form.

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
        settings = {"num_classes": config["num_classes"], **config.get("model_args", {})}
        with torch.device("meta"):
            model = _timm().create_model(config["architecture"], **settings)
        return found ^ set(model.state_dict())
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
    if name_or_path in FROM_SCRATCH:
        return _from_scratch(name_or_path, label_names, image_size)
    if name_or_path.startswith("builtin:"):
        if name_or_path not in BUILTIN_MODELS:
            known = ", ".join([*BUILTIN_MODELS, *FROM_SCRATCH])
            raise ValueError(f"{name_or_path!r} is unknown; use {known}.")
        name_or_path = str(BUILTIN_MODELS[name_or_path])
    config = _stored_config(name_or_path)
    if "architecture" in config or name_or_path.startswith("timm/"):  # HF writes "architectures"
        return _load_timm(name_or_path, label_names, image_size)
    return _load_transformers(name_or_path, label_names, image_size, revision)


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

    head = head_parameters(model)
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
    timm = _timm()
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
        if model.pretrained_cfg.get("fixed_input_size"):
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
    architecture, side = FROM_SCRATCH[name]
    side = side if image_size is None else image_size
    # Not the statistics of any data: those of private images would not be covered by epsilon.
    image_format = ImageFormat(
        height=side,
        width=side,
        num_channels=3,
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
        interpolation="bicubic",
    )
    # What timm knows of pretrained weights of this architecture is not true of these.
    sources = dict.fromkeys(("tag", "url", "hf_hub_id", "license"), "")
    model = _timm().create_model(
        architecture, num_classes=len(label_names), pretrained_cfg_overlay=sources
    )
    _work_out_of_place(model)
    return LoadedModel(
        model=model,
        image_format=image_format,
        processor=None,
        library="timm",
        label_names=label_names,
        notes=(f"{name} is not pretrained: all its weights are random",),
    )


def _timm() -> ModuleType:
    """Return timm, which then knows the networks of this package; both are slow to import."""
    import timm

    import hf_dpmuon.networks  # noqa: F401  # registers them

    library: ModuleType = timm
    return library


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
