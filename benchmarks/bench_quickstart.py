"""Test accuracy of the quickstart, and of the same run with DP-SGD, over fresh draws of the noise.

    python benchmarks/bench_quickstart.py --draws 5 --report benchmarks/reports

Each run is `scripts/finetune_vit.py` with its config: the same split, new head (`--seed`), budget,
batch and steps. Only sampling and noise differ from draw to draw, as they come from the operating
system. The rows of DP-SGD differ from the config in `dp_optimizer` and `learning_rate`, nothing
else. Methods take turns, so that they share whatever else the machine is doing.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch
from tqdm import tqdm
from transformers import set_seed

from hf_dpmuon import DPTrainer, ImageExamples, build_transforms, load_image_dataset, load_model
from hf_dpmuon.arguments import parse_arguments
from hf_dpmuon.data import ImageSplits

ROOT = Path(__file__).resolve().parents[1]


class Run(NamedTuple):
    """What one run gave: times are from loading the model to its evaluation."""

    accuracy: float  # on the test split, in percent
    epsilon: float
    seconds: float
    cpu_seconds: float  # which other processes disturb less


def finetune(options: list[str], splits: ImageSplits) -> Run:
    """Run the fine-tuning of these options once."""
    start, cpu_start = time.perf_counter(), time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        model_args, data_args, args = parse_arguments([*options, "--output_dir", folder])
        set_seed(args.seed)
        loaded = load_model(model_args.model_name_or_path, label_names=splits.label_names)
        train, evaluation = (
            ImageExamples(
                split,
                image_column=splits.image_column,
                label_column=splits.label_column,
                transform=build_transforms(
                    loaded.image_format,
                    train=split is splits.train,
                    random_flip=data_args.random_flip,
                    random_crop=data_args.random_crop,
                ),
            )
            for split in (splits.train, splits.evaluation)
        )
        trainer = DPTrainer(loaded, args, train_dataset=train, eval_dataset=evaluation)
        trainer.train()
        accuracy = 100 * trainer.evaluate()["eval_accuracy"]
        return Run(
            accuracy=accuracy,
            epsilon=trainer.epsilon(),
            seconds=time.perf_counter() - start,
            cpu_seconds=time.process_time() - cpu_start,
        )


def row(method: str, runs: list[Run]) -> str:
    """One line of the table."""
    accuracies, epsilons, seconds, cpu_seconds = zip(*runs, strict=True)
    spread = statistics.stdev(accuracies) if len(runs) > 1 else float("nan")
    single = ", ".join(f"{accuracy:.1f}" for accuracy in accuracies)
    return (
        f"| {method} | {statistics.mean(accuracies):.1f} | {spread:.1f} | {single} "
        f"| {max(epsilons):.3f} | {statistics.mean(seconds):.0f} "
        f"| {statistics.mean(cpu_seconds):.0f} |"
    )


def main() -> None:
    """Read the command line, run, and print the table."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--draws", type=int, default=5, help="runs of each method")
    parser.add_argument(
        "--config", type=Path, default=ROOT / "configs" / "quickstart.yaml", help="of the run"
    )
    parser.add_argument(
        "--sgd_learning_rate", type=float, nargs="*", default=[0.5], help="one DP-SGD row for each"
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of torch")
    parser.add_argument("--report", type=Path, help="write the table to a file in this folder")
    arguments = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    torch.set_num_threads(arguments.threads)

    config = ["--config", str(arguments.config), "--disable_tqdm", "true"]
    model_args, data_args, args = parse_arguments(config)
    splits = load_image_dataset(data_args.dataset_name)
    methods = {f"config ({args.dp_optimizer}, learning rate {args.learning_rate:g})": config}
    for rate in arguments.sgd_learning_rate:
        options = ["--dp_optimizer", "sgd", "--learning_rate", str(rate)]
        options += ["--orthogonalize_head", "true"]  # its default: DP-SGD knows no such choice
        methods[f"DP-SGD, learning rate {rate:g}"] = config + options
    runs: dict[str, list[Run]] = {method: [] for method in methods}
    with tqdm(total=arguments.draws * len(methods), unit="run") as progress:
        for _ in range(arguments.draws):
            for method, options in methods.items():
                runs[method].append(finetune(options, splits))
                progress.write(f"{method}: {runs[method][-1].accuracy:.2f} %")
                progress.update()

    lines = [
        f"# Quickstart, {datetime.date.today().isoformat()}",
        "",
        f"`{arguments.config.name}`: {model_args.model_name_or_path} on {data_args.dataset_name}, "
        f"logical batch {args.logical_batch_size}, {args.max_steps} steps, "
        f"{arguments.draws} draws of the noise a method. {platform.machine()}, "
        f"{arguments.threads} thread(s), torch {torch.__version__}.",
        "",
        "| method | test accuracy, % | standard deviation | single runs | epsilon | s a run "
        "| CPU s a run |",
        "|---|---|---|---|---|---|---|",
        *(row(method, runs[method]) for method in methods),
    ]
    print("\n".join(lines))
    if arguments.report:
        arguments.report.mkdir(parents=True, exist_ok=True)
        path = arguments.report / f"quickstart_cpu_{datetime.date.today().isoformat()}.md"
        path.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
