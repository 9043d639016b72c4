"""The shape of the package: who imports whom, who draws noise, what the public names are."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import hf_dpmuon

PACKAGE = Path(hf_dpmuon.__file__).parent

# Each room may import only rooms above it.
ROOMS = [
    "rounding",
    "files",
    "figures",
    "accounting",
    "options",
    "group_privacy",
    "membership",
    "auditing",
    "plan",
    "randomness",
    "units",
    "sampling",
    "data",
    "roles",
    "networks",
    "adapters",
    "models",
    "validation",
    "scope",
    "grad_sample",
    "known_noise",
    "random_matrix",
    "filters",
    "spectral",
    "mechanism",
    "ledger",
    "optim",
    "default_rates",
    "methods",
    "metrics",
    "model_card",
    "public_files",
    "hub",
    "parsing",
    "arguments",
    "circumstances",
    "keys",
    "run",
    "callbacks",
    "diagnostics",
    "batches",
    "model_folder",
    "training",
    "advice",
    "publishing_trainer",
    "trainer",
    "job",
    "canaries",
    "finetune",
    "cli",
]
FILES = sorted(p for p in PACKAGE.rglob("*.py") if p != PACKAGE / "__init__.py")


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> set[str]:
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        rooms |= {n.split(".")[1] for n in names if n.startswith("hf_dpmuon.")}
    return rooms


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_room_imports_only_rooms_above_it(path):
    room = room_of(path)
    above = ROOMS[: ROOMS.index(room)]
    assert imported_rooms(path) <= {*above, room}


def calls(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            function = node.func
            found.add(
                function.attr
                if isinstance(function, ast.Attribute)
                else getattr(function, "id", "")
            )
    return found


def test_gaussian_noise_is_drawn_in_the_mechanism_only():
    drawing = {"standard_normal", "normal", "normal_", "randn", "randn_like"}
    files = {str(p.relative_to(PACKAGE)) for p in FILES if calls(p) & drawing}
    # The check before a run shifts weights at random and puts them back.
    assert files == {"mechanism.py", "grad_sample/verification.py"}


def test_optimizers_and_spectral_maps_know_no_mechanism():
    for room in ("optim", "spectral", "filters"):
        path = PACKAGE / f"{room}.py"
        if path.exists():
            assert not imported_rooms(path) & {"mechanism", "ledger", "grad_sample", "sampling"}


def test_diagnostics_and_random_matrix_facts_know_no_private_row_or_raw_gradient():
    raw = {"mechanism", "grad_sample", "sampling", "batches", "data", "training", "run"}
    for room in ("diagnostics", "random_matrix"):
        assert not imported_rooms(PACKAGE / f"{room}.py") & raw


def test_every_room_is_in_the_table_and_says_what_it_exports():
    for path in FILES:
        assert room_of(path) in ROOMS
        assert ast.get_docstring(ast.parse(path.read_text())), path
    for room in {room_of(path) for path in FILES}:
        module = import_module(f"hf_dpmuon.{room}")
        assert set(module.__all__) <= set(vars(module)), room


def test_every_public_name_exists_and_comes_from_the_room_that_exports_it():
    for name in hf_dpmuon.__all__:
        assert getattr(hf_dpmuon, name) is not None
    assert sorted(hf_dpmuon.__all__) == sorted(hf_dpmuon._ROOM_OF)
    for name, room in hf_dpmuon._ROOM_OF.items():
        assert name in import_module(f"hf_dpmuon.{room}").__all__
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    typed = {
        (alias.name, node.module)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hf_dpmuon.")
        for alias in node.names
    }
    assert typed == {(n, f"hf_dpmuon.{room}") for n, room in hf_dpmuon._ROOM_OF.items()}
    with pytest.raises(AttributeError, match="no_such_name"):
        hf_dpmuon.no_such_name  # noqa: B018


LIGHT = {
    "rounding, accounting, plan": "import hf_dpmuon.rounding, hf_dpmuon.accounting, hf_dpmuon.plan",
    "ledger": "import hf_dpmuon.ledger",
    "a public epsilon": "import hf_dpmuon; hf_dpmuon.compute_epsilon",
    "budget": "main(['budget', '--num_units', '5000', '--epsilon', '8', '--steps', '9'])",
    "budget --help": "main(['budget', '--help'])",
    "advise --help": "main(['advise', '--help'])",
    "inspect --help": "main(['inspect', '--help'])",
    "card --help": "main(['card', '--help'])",
    "audit --help": "main(['audit', '--help'])",
    "--help": "main(['--help'])",
    "finetune --help": "main(['finetune', '--help'])",
    "configs": "main(['configs'])",
    "finetune_vit --help": "from hf_dpmuon.finetune import main; main(['-h'], program='')",
}


@pytest.mark.parametrize("entry", LIGHT)
def test_light_rooms_and_commands_load_no_framework(entry):
    code = (
        "import sys\nfrom hf_dpmuon.cli import main\n"
        f"try:\n    {LIGHT[entry]}\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'transformers', 'opacus', 'datasets', 'timm', 'matplotlib', 'sklearn'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, capture_output=True)


def test_optim_imports_torch_spectral_and_known_noise_only():
    assert imported_rooms(PACKAGE / "optim.py") == {"spectral", "known_noise"}
    code = (
        "import sys, hf_dpmuon.optim; heavy = {'transformers', 'PIL', 'torchvision', 'opacus'}; "
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_no_test_module_imports_from_another():
    """Helpers are in `support` and in modules that hold no test."""
    for path in Path(__file__).parent.glob("*.py"):
        modules = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                modules.add(node.module or "")
            elif isinstance(node, ast.Import):
                modules |= {alias.name for alias in node.names}
        others = {name for name in modules if name.startswith("test_") or name == "conftest"}
        assert not others, f"{path.name} imports {others}"


def test_no_text_begins_with_a_bare_of():
    """Neither a docstring, an entry of one, a comment nor a help text."""
    begins = re.compile(r'^\s*(#|"""|[a-z_*, ]+:)\s*Of |help="of ', re.MULTILINE)
    found = {str(p.relative_to(PACKAGE)): begins.search(p.read_text()) for p in FILES}
    assert {name: match[0] for name, match in found.items() if match} == {}
