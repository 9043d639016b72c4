"""Make the pages that follow from the code: the table of options, and the table of rooms.

Run `make docs` after an option or a module changed; `tests/test_docs.py` says when to.
"""

from __future__ import annotations

import ast
import sys
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
PACKAGE = DOCS.parent / "hf_dpmuon"
TABLE = "<!-- rooms -->"


def options_page() -> str:
    """All options of ours, by group, and those of the base class that are refused."""
    from hf_dpmuon.arguments import REFUSED, REFUSED_WHEN
    from hf_dpmuon.options import GROUPS

    lines = [
        "# Options",
        "",
        "Made by `make docs` from `hf_dpmuon/options.py`. Options may stand on the command line,",
        "in the YAML file of `--config` (the command line wins) or in Python. All options of",
        "`transformers.TrainingArguments` work as there unless they are named below;",
        "`hf-dpmuon finetune --help-all` lists them.",
    ]
    for title, kind in GROUPS.items():
        lines += ["", f"## {title}", "", "| option | default | meaning |", "|---|---|---|"]
        lines += [_row(option, kind) for option in fields(kind)]
    lines += ["", "## Refused", "", "| option | why |", "|---|---|"]
    for name, reason in sorted(REFUSED.items()):
        some = ", at some values" if name in REFUSED_WHEN else ""
        lines.append(f"| `{name}`{some} | It {reason}. |")
    return "\n".join(lines) + "\n"


def _row(option: Field[Any], kind: type) -> str:
    from hf_dpmuon.parsing import help_of

    default = "" if option.default is None else f"`{option.default}`"
    text = help_of(option, kind, code="`").replace("|", "\\|").replace("<", "&lt;")
    return f"| `{option.name}` | {default} | {text} |"


def rooms_table() -> str:
    """One line a room, in the order in which they may import each other."""
    sys.path.insert(0, str(DOCS.parent / "tests"))
    from test_architecture import ROOMS

    lines = ["| room | what it says |", "|---|---|"]
    for room in ROOMS:
        path = PACKAGE / f"{room}.py"
        path = path if path.exists() else PACKAGE / room / "__init__.py"
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        lines.append(f"| `{room}` | {' '.join(docstring.split(chr(10) * 2)[0].split())} |")
    return "\n".join(lines)


def architecture_page() -> str:
    """The page with its table made anew."""
    before, _, rest = (DOCS / "architecture.md").read_text(encoding="utf-8").partition(TABLE)
    _, _, after = rest.partition(TABLE)
    return f"{before}{TABLE}\n{rooms_table()}\n{TABLE}{after}"


if __name__ == "__main__":
    (DOCS / "options.md").write_text(options_page(), encoding="utf-8")
    (DOCS / "architecture.md").write_text(architecture_page(), encoding="utf-8")
