"""Stands in for packages that SGLang imports and a CPU run does not use: they would take a gigabyte.

Python runs this at its start where the folder is on PYTHONPATH. Names of such packages are found here unless they are
installed; what is taken from them can be imported, used as a decorator or compared, and does nothing.
"""

from __future__ import annotations

import gc
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

ABSENT = ("IPython", "torchvision", "triton")


class NothingsClass(type):
    """Of classes that are taken from an absent package: they have every attribute."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return NOTHING


class Nothing(metaclass=NothingsClass):
    """Whatever is taken from an absent package."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        # As a decorator, or as what makes one: the function stays as it is.
        if len(arguments) == 1 and not options and callable(arguments[0]):
            return arguments[0]
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __getitem__(self, _: Any) -> Any:
        return self

    def __mro_entries__(self, _: Any) -> tuple[type, ...]:
        return (Nothing,)

    def __or__(self, _: Any) -> Any:
        return self

    __ror__ = __or__


NOTHING = Nothing()


class AbsentModule(ModuleType):
    """A module of an absent package. It has every name."""

    __version__ = "3.9.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name[0].isupper():  # torch asks what is an instance of it
            setattr(self, name, type(name, (Nothing,), {}))
            return self.__dict__[name]
        return KNOWN.get(f"{self.__name__}.{name}", NOTHING)


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


class NoDriver:
    """`triton.runtime.driver`: says that there is no device."""

    @property
    def active(self) -> Any:
        raise RuntimeError("0 active drivers")


class NoRuntime:
    """`triton.runtime`, for who did not import it as a module."""

    driver = NoDriver()


# These are called.
KNOWN: dict[str, Any] = {
    "triton.cdiv": cdiv,
    "triton.next_power_of_2": next_power_of_2,
    "triton.runtime": NoRuntime(),
    "triton.runtime.driver": NoRuntime.driver,
}


class AbsentFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules of absent packages. The last one that is asked."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] in ABSENT:
            return importlib.util.spec_from_loader(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return AbsentModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


sys.meta_path.append(AbsentFinder())
# Each of an engine's three processes imports a million objects, which are no garbage.
gc.set_threshold(100_000, 50, 100)
