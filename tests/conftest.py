"""Every test runs offline: ``support`` says so before anything reads it."""

import gc

import pytest
import support  # noqa: F401

# Files that take longest, by name; they come first, so that no worker is left alone with one.
LONGEST = (
    *("finetune_script", "trainer", "interruptions", "processes", "medical_configs", "methods"),
    *("release", "accounting", "hub", "models_matrix", "grad_sample_engines"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.stem.removeprefix("test_") not in LONGEST)


def pytest_collection_finish() -> None:
    """Take what the imports left out of the collector's sight: each training collects all."""
    gc.collect()
    gc.freeze()
