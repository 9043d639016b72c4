"""The command that fine-tunes, in this process or in one for each device.

Receives the words of a command line; prints help or what a run says, and returns the exit code.

Guarantees:
    Bad input ends with one sentence on stderr and exit code 2. ``--help`` loads no framework.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

from hf_dpmuon.parsing import answer_help, option_of

__all__ = ["launch", "main"]


def main(argv: Sequence[str], *, program: str) -> int:
    """Run in this process, which may be one of several that a launcher has started."""
    handler = logging.StreamHandler(sys.stdout)
    is_main = os.environ.get("RANK", "0") == "0"
    logger = logging.getLogger("hf_dpmuon")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO if is_main else logging.ERROR)
    logger.propagate = False
    try:
        answer_help(argv, program)  # before the frameworks, which it does without
        import torch
        from safetensors import SafetensorError

        from hf_dpmuon.arguments import parse_arguments
        from hf_dpmuon.job import finetune

        try:
            finetune(*parse_arguments(argv, program=program))
        except (NotImplementedError, SafetensorError) as error:
            raise ValueError(error) from error
        if torch.distributed.is_initialized():
            # Threads that gloo still runs when the interpreter ends would abort the process.
            torch.distributed.barrier()
            torch.distributed.destroy_process_group()
    except (ValueError, OSError) as error:
        print(f"{program.removesuffix('.py')}: {error}", file=sys.stderr)
        return 2
    return 0


def launch(argv: Sequence[str], *, program: str, module: Sequence[str]) -> int:
    """Run in one process for each device, where there are several and no launcher started this.

    Args:
        argv: The words of the run.
        program: What the user calls the command.
        module: What the processes run: a module, and the words that come before ``argv``.
    """
    said = {option_of(word) for word in argv if word.startswith("-")}
    if said & {"h", "help", "help_all", "use_cpu"} or "RANK" in os.environ:
        return main(argv, program=program)
    import torch

    devices = torch.accelerator.device_count()
    if devices < 2:
        return main(argv, program=program)
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    words = ["--multi_gpu", f"--num_processes={devices}", "--num_machines=1"]
    words += ["--mixed_precision=no", "--dynamo_backend=no", "--module", *module, *argv]
    try:
        launch_command(launch_command_parser().parse_args(words))
    except ChildFailedError as error:  # the process has said why
        return error.get_first_failure()[1].exitcode
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], program="python -m hf_dpmuon.finetune"))
