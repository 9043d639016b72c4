"""Every test runs offline: ``support`` says so before anything reads it."""

import gc

import support  # noqa: F401


def pytest_collection_finish() -> None:
    """Take what the imports left out of the collector's sight: each training collects all."""
    gc.collect()
    gc.freeze()
