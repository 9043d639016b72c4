"""Faults of one line, each with the tests that must notice it; prints those that survive.

    python benchmarks/mutants.py [words]     # all, or those whose file or text has one of the words

Each is planted in a copy of the package, and its tests run there until the first one fails.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PATIENCE = 300  # seconds; who hangs is noticed, too
HEAVY = ("torch", "transformers", "opacus", "datasets", "timm", "accelerate", "hypothesis", "scipy")


class Mutant(NamedTuple):
    """A file below the package, what stands there once, what is put there, and who must notice."""

    file: str
    old: str
    new: str
    tests: str


MUTANTS = [
    # Mechanism
    Mutant("mechanism", "clamp(max=1.0).expand_as", "clamp(max=2.0).expand_as", "mechanism"),
    Mutant("mechanism", "math.sqrt(num_layers)", "1.0", "mechanism"),
    Mutant("mechanism", "(total + AUTOMATIC_STABILISER)", "total", "mechanism"),
    Mutant("mechanism", "total.isfinite() & ", "", "mechanism grad_sample_scales"),
    Mutant("mechanism", "dim=0)  # (B,)", "dim=0) / 2  # (B,)", "mechanism"),
    Mutant("mechanism", "norm / self.loss_scale", "norm", "mechanism sensitivity"),
    Mutant("mechanism", "factor / self.loss_scale", "factor", "mechanism sensitivity"),
    Mutant(
        "mechanism",
        "scale = self.noise_multiplier * self.max_grad_norm\n",
        "scale = self.noise_multiplier\n",
        "mechanism",
    ),
    Mutant("mechanism", ".add_(self._total).div_(", ".div_(", "mechanism"),
    Mutant("mechanism", 'use = f"{step} {self', 'use = f"{self', "mechanism"),
    Mutant("mechanism", "total, name.encode()", "total", "mechanism canaries"),
    Mutant(
        "mechanism",
        'b"" if self._fixed_noise else _sha256(self._total[:-1])',
        'b""',
        "mechanism release",
    ),
    Mutant("mechanism", "sample_rate=self.sample_rate,", "sample_rate=1.0,", "mechanism trainer"),
    Mutant("mechanism", "sample_rate * num_units", "num_units", "mechanism trainer"),
    # The step
    Mutant("training/step", "engine.set_units(unit_of_row", "(unit_of_row", "canaries"),
    Mutant("training/step", "self.run.record(event)", "pass", "trainer release"),
    Mutant("training/step", "size * point.coefficient", "size", "methods sensitivity filters"),
    Mutant("training/step", "scaled = loss * (size *", "scaled = loss * (", "trainer"),
    Mutant(
        "training/step",
        "with moved_to(parameters, point), seeded_globals(seed, devices=devices):",
        "with moved_to(parameters, point):",
        "secret_randomness",
    ),
    Mutant("training/step", "{self.rank} {index}", "{self.rank}", "secret_randomness trainer"),
    Mutant("training/step", "if not self.run.may_take(step)", "if False", "trainer release"),
    # Sampling
    Mutant(
        "sampling",
        "generator.geometric(self.sample_rate",
        "generator.geometric(self.sample_rate / 2",
        "sampling",
    ),
    Mutant("sampling", "last = -1", "last = 0", "sampling"),
    Mutant("sampling", "self._pull()  # the place", "pass  # the place", "sampling"),
    Mutant("sampling", "keys or [(units[:0], units[:0])]", "keys", "sampling"),
    Mutant("sampling", "replace=False", "replace=True", "sampling units_and_labels"),
    Mutant("sampling", "slice(rank, None, world_size)", "slice(0, None, world_size)", "sampling"),
    Mutant("sampling", "self._draws.go_to(self._next_draw)", "pass", "sampling"),
    # Randomness and keys
    Mutant("randomness", "secrets.token_bytes(32)", "bytes(32)", "randomness secret_randomness"),
    Mutant("randomness", "lengths + ", "", "randomness"),
    Mutant("randomness", "random.setstate(python)", "pass", "secret_randomness"),
    Mutant("keys", "mode=0o700", "mode=0o777", "release boundary"),
    Mutant("keys", "os.chmod(self.folder, 0o700)", "pass", "release boundary"),
    Mutant("keys", "in (None, _digest(partition))", "is not False", "units_and_labels release"),
    Mutant(
        "keys",
        'resolved.with_name(f"{resolved.name}.secrets")',
        'resolved / "secrets"',
        "boundary release",
    ),
    # Ledger
    Mutant("ledger", "last.steps + 1", "last.steps", "ledger"),
    Mutant("ledger", "or chain != _link(self.head, content)", "", "ledger"),
    Mutant("ledger", "os.fsync(descriptor)", "pass", "ledger interruptions"),
    Mutant("ledger", "if size != self._size + self._torn:", "if False:", "ledger"),
    Mutant("ledger", "all(facts.guarantee for", "any(facts.guarantee for", "ledger"),
    Mutant("ledger", "self._check_run(facts)\n", "", "ledger"),
    # Run
    Mutant("run", "if event != replay.event:", "if False:", "release trainer"),
    Mutant("run", "self.remaining -= 1", "pass", "trainer release"),
    Mutant("run", "and is_repeatable:", "or is_repeatable:", "release"),
    Mutant("run", "args.noise_seed is None and ", "", "trainer"),
    Mutant("run", "and not changed", "", "release"),
    # Accounting, plan, groups
    Mutant("accounting", "orders / (", "orders / 2 / (", "accounting"),
    Mutant("accounting", "math.log(delta) + np.log(orders)", "math.log(delta)", "accounting"),
    Mutant("accounting", "get(mechanism, 0) + event.steps", "get(mechanism, 0) + 1", "accounting"),
    Mutant("plan", "1 / (10 * num_units)", "1 / num_units", "accounting trainer"),
    Mutant("plan", "if fits(middle):", "if not fits(middle):", "accounting"),
    Mutant("group_privacy", "max(0.0, removal, addition)", "max(0.0, removal)", "accounting"),
    Mutant("membership", "+ delta,", ",", "accounting"),
    # Engines
    Mutant(
        "grad_sample/engine",
        "weights[:, None] != 0, flat, 0.0",
        "weights[:, None] != 0, flat, flat",
        "grad_sample_scales",
    ),
    Mutant(
        "grad_sample/engine",
        "1 / rows_of_unit[unit_of_row].double()",
        "rows_of_unit[unit_of_row].double()",
        "units_and_labels",
    ),
    Mutant(
        "grad_sample/contributions",
        "(a_UT * g_UT).sum(1)",
        "(a_UT * g_UT).amax(1)",
        "grad_sample_scales",
    ),
    # Units and what leaves
    Mutant("units", "if len(kinds) > 1 or", "if", "sampling data_units"),
    Mutant("units", "text.lower().translate(_ASCII_UNSEEN)", "text", "sampling data_units"),
    Mutant("public_files", "if not report.guarantee:", "if False:", "hub"),
    Mutant("public_files", "if not report.protects:", "if False:", "hub"),
    Mutant(
        "public_files", "if not stat.S_ISREG((folder / name).lstat().st_mode):", "if False:", "hub"
    ),
    Mutant("public_files", "_check_tensors(folder, weights)\n    if", "if", "hub"),
]


def main(words: list[str]) -> int:
    """Plant each mutant; return how many survived."""
    for name in HEAVY:  # once, and not in each child
        importlib.import_module(name)
    chosen = [m for m in MUTANTS if not words or any(w in m.file or w in m.old for w in words)]
    survivors = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "tree"
        left_out = shutil.ignore_patterns("__pycache__", ".*", "outputs", "*.egg-info")
        shutil.copytree(ROOT, copy, ignore=left_out)
        sound: dict[str, bool] = {}
        for mutant in chosen:
            path = copy / "hf_dpmuon" / f"{mutant.file}.py"
            text = path.read_text()
            if mutant.tests not in sound:
                sound[mutant.tests] = not _is_noticed(copy, mutant.tests.split())
            if text.count(mutant.old) != 1:
                verdict = f"STALE ({text.count(mutant.old)} places)"
            elif not sound[mutant.tests]:
                verdict = "TESTS FAIL WITHOUT IT"
            else:
                path.write_text(text.replace(mutant.old, mutant.new))
                verdict = "killed" if _is_noticed(copy, mutant.tests.split()) else "SURVIVED"
                path.write_text(text)
            survivors += verdict != "killed"
            print(f"{verdict:<10} {mutant.file}: {mutant.old!r} -> {mutant.new!r}", flush=True)
    print(f"{len(chosen) - survivors} of {len(chosen)} killed")
    return survivors


def _is_noticed(copy: Path, tests: list[str]) -> bool:
    child = os.fork()
    if child == 0:
        _run(copy, tests)
    _, status = os.waitpid(child, 0)
    return status != 0


def _run(copy: Path, tests: list[str]) -> None:
    """In a process of its own: end with 0 if all tests pass."""
    import pytest

    signal.alarm(PATIENCE)
    os.chdir(copy)
    os.environ["PYTHONPATH"] = str(copy)
    sys.dont_write_bytecode = True
    sys.path[:0] = [str(copy), str(copy / "tests")]
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
        files = [f"tests/test_{name}.py" for name in tests]
        code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *files])
    os._exit(int(code != 0))


if __name__ == "__main__":
    sys.exit(min(1, main(sys.argv[1:])))
