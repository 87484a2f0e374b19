"""Errors are made where they are raised."""

import importlib
import pkgutil

import kvpool


def test_no_module_keeps_an_error() -> None:
    """One that is raised again and again keeps the frames of each time, and all that they hold."""
    seen = 0
    for info in pkgutil.walk_packages(kvpool.__path__, "kvpool."):
        if info.name.startswith("kvpool.engine_plugins.vllm") or info.name.endswith("__main__"):
            continue
        try:
            module = importlib.import_module(info.name)
        except ImportError:
            continue  # what needs torch, say
        seen += 1
        kept = [name for name, value in vars(module).items() if isinstance(value, BaseException)]
        assert kept == [], info.name
    assert seen > 150
