"""The facts that the plugins of all engines share."""

from __future__ import annotations

import platform

import pytest

from kvpool.engine_plugins.facts import release, versions

PYTHON = {"python": platform.python_version()}


@pytest.mark.parametrize(
    ("engine", "one", "other", "same"),
    [
        ("vllm", "0.32.0", "0.32.1", True),
        ("vllm", "0.32.0", "0.32.0+cpu", True),
        ("vllm", "0.32.0", "0.32.1.dev5+g1234", True),
        ("vllm", "0.32.0", "0.33.0", False),
        ("vllm", "0.32.0", "1.32.0", False),
        ("vllm", "dev", "dev", True),
        ("vllm", "dev", "other", False),
        # SGLang's releases are in the third number.
        ("sglang", "0.5.23", "0.5.23.post1", True),
        ("sglang", "0.5.23", "0.5.24", False),
        ("sglang", "0.5.23", "0.6.23", False),
    ],
)
def test_versions_of_one_release_share(engine: str, one: str, other: str, same: bool) -> None:
    assert (release(engine, one) == release(engine, other)) is same


def test_the_versions_that_must_agree() -> None:
    def of(*, pickled: bool = False, any_version: bool = False) -> dict[str, str]:
        return versions("vllm", "0.32.1", pickled=pickled, any_version=any_version)

    assert of() == {"vllm": "0.32"}
    assert of(any_version=True) == {}
    assert of(pickled=True) == {"vllm": "0.32.1"} | PYTHON
    assert of(pickled=True, any_version=True) == PYTHON
