"""Every test runs offline: ``support`` says so before anything reads it."""

import support  # noqa: F401
