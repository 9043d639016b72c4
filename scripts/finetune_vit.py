"""Fine-tune a pretrained vision transformer with differential privacy.

Offline, on real handwritten digits, in about two minutes of two CPU cores:

    accelerate launch scripts/finetune_vit.py --config quickstart

On a data set of the Hub:

    accelerate launch scripts/finetune_vit.py \
        --model_name_or_path google/vit-base-patch16-224-in21k \
        --dataset_name <hub id> --target_epsilon 8 --logical_batch_size 1024 \
        --output_dir outputs/my-run

`timm/<name>` picks a timm model. See --help for every option. Without a checkout the same is
`hf-dpmuon finetune` or `accelerate launch -m hf_dpmuon.finetune`.
"""

import sys

from hf_dpmuon.finetune import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], program="finetune_vit.py"))
