"""The examples in the docstrings are true."""

import doctest
import importlib

import pytest

MODULES = (
    "db.location",
    "profiler.flags",
    "profiler.idle",
    "profiler.latency",
    "profiler.probe",
    "profiler.refine",
    "profiler.summary",
)


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted > 0
    assert result.failed == 0
