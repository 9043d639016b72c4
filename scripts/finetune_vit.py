"""Fine-tune a pretrained vision transformer with differential privacy.

Offline, on real handwritten digits, in about two minutes of two CPU cores:

    accelerate launch scripts/finetune_vit.py --config configs/quickstart.yaml

On a data set of the Hub:

    accelerate launch scripts/finetune_vit.py \
        --model_name_or_path google/vit-base-patch16-224-in21k \
        --dataset_name <hub id> --target_epsilon 8 --logical_batch_size 1024 \
        --output_dir outputs/my-run

`timm/<name>` picks a timm model. See --help for every option.
"""

from __future__ import annotations

import logging
import os
import sys

from hf_dpmuon.parsing import answer_help


def main() -> None:
    """Run from the command line; bad input ends with one sentence and exit code 2."""
    handler = logging.StreamHandler(sys.stdout)
    is_main = os.environ.get("RANK", "0") == "0"
    logger = logging.getLogger("hf_dpmuon")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO if is_main else logging.ERROR)
    logger.propagate = False
    try:
        answer_help(sys.argv[1:])  # before the frameworks, which it does without
        import torch
        from safetensors import SafetensorError

        from hf_dpmuon.arguments import parse_arguments
        from hf_dpmuon.job import finetune

        try:
            finetune(*parse_arguments())
        except (NotImplementedError, SafetensorError) as error:
            raise ValueError(error) from error
        if torch.distributed.is_initialized():
            # Threads that gloo still runs when the interpreter ends would abort the process.
            torch.distributed.barrier()
            torch.distributed.destroy_process_group()
    except (ValueError, OSError) as error:
        print(f"finetune_vit: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
