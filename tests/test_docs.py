"""The pages say what the code says, and their links lead somewhere."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
sys.path.insert(0, str(ROOT / "docs"))
import generate  # noqa: E402


def test_the_page_of_options_is_current():
    assert (ROOT / "docs" / "options.md").read_text() == generate.options_page(), "run `make docs`"


def test_the_table_of_rooms_is_current():
    page = (ROOT / "docs" / "architecture.md").read_text()
    assert page == generate.architecture_page(), "run `make docs`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if "://" not in link:
            assert (page.parent / link).exists(), link


def test_python_in_the_readme_compiles():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert blocks
    for block in blocks:
        compile(block, "README.md", "exec")


def test_every_test_that_a_page_names_exists():
    """A name may end in ``...`` for the rest of it, or be that of a file."""
    tests = {path.name: path.read_text() for path in (ROOT / "tests").glob("test_*.py")}
    functions = "\n".join(re.findall(r"^ *def (test_\w+)", "\n".join(tests.values()), re.M))
    for page in PAGES:
        for name in re.findall(r"`(test_[\w.]+)`", page.read_text()):
            start = re.escape(name.removesuffix("..."))
            end = r"\w*" if name.endswith("...") else ""
            assert name in tests or re.search(f"^{start}{end}$", functions, re.M), (page.name, name)
