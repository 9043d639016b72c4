"""What is distributed: a source distribution, and the wheel that is made from it, offline."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from setuptools import build_meta
from support import ROOT, forked

from hf_dpmuon.parsing import shipped_configs

FOLDERS = ("hf_dpmuon", "configs", "scripts", "tests", "docs", "benchmarks")


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The files of a source distribution, and of the wheel that was built from them."""
    home = tmp_path_factory.mktemp("built")
    tree = home / "tree"
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, tree)

    def build() -> None:
        os.chdir(tree)
        with tarfile.open(home / build_meta.build_sdist(str(home))) as archive:
            archive.extractall(home / "source", filter="data")
        os.chdir(next((home / "source").iterdir()))
        with zipfile.ZipFile(home / build_meta.build_wheel(str(home))) as archive:
            archive.extractall(home / "wheel")

    done = forked(build)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "would be ignored" not in done.stderr
    return next((home / "source").iterdir()), home / "wheel"


def files(folder: Path) -> set[str]:
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_the_wheel_has_every_file_of_the_package_and_nothing_else(unpacked):
    _, wheel = unpacked
    assert files(wheel / "hf_dpmuon") == files(ROOT / "hf_dpmuon") | {
        f"configs/{name}" for name in files(ROOT / "configs")
    }
    assert {path.name for path in wheel.iterdir()} == {
        "hf_dpmuon",
        f"hf_dpmuon-{version('hf-dpmuon')}.dist-info",
    }
    for name in ("model.safetensors", "config.json"):
        shipped = f"hf_dpmuon/pretrained/tiny-vit-fashion-mnist/{name}"
        assert (wheel / shipped).read_bytes() == (ROOT / shipped).read_bytes()


def test_the_wheel_finds_its_configurations_from_another_folder(unpacked, tmp_path):
    _, wheel = unpacked
    done = subprocess.run(
        [sys.executable, "-m", "hf_dpmuon.cli", "configs", "copied"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(wheel)},
        check=True,
        timeout=120,
    )
    assert done.returncode == 0
    copied = {path.stem: path.read_bytes() for path in (tmp_path / "copied").iterdir()}
    assert copied == {name: path.read_bytes() for name, path in shipped_configs().items()}


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_source_has_what_its_tests_need(unpacked, folder):
    source, _ = unpacked
    assert files(source / folder) == files(ROOT / folder)
    assert {"README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "Makefile"} <= files(source)


def test_the_citation_names_the_software_and_the_paper_of_the_readme():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0"
    assert {"message", "title", "authors"} <= set(citation)
    paper = citation["preferred-citation"]
    readme = (ROOT / "README.md").read_text()
    assert paper["identifiers"][0]["value"].removeprefix("arXiv:") in readme
    assert ", ".join(author["family-names"] for author in paper["authors"]) in readme
    assert citation["license"] == "Apache-2.0"
    assert "version" not in citation, "pyproject.toml has it"
