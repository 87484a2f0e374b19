"""What hardware and models can do: read from the files in `profiles/`, each with its source."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from kvpool.errors import ConfigError

T = TypeVar("T", "Hardware", "Model")


@dataclass(frozen=True, slots=True)
class Hardware:
    """One node, which runs one engine over all its accelerators.

    flop_s, memory_bytes, memory_bytes_s: of one accelerator. flop_share, memory_share: what an engine gets
    of these. step_s: what every step takes besides. host_bytes_s: between DRAM and all accelerators
    together. network_bytes_s: in each direction. ssd_bytes_s: reads.
    """

    source: str
    accelerators: int
    flop_s: float
    flop_share: float
    memory_bytes: float
    memory_bytes_s: float
    memory_share: float
    step_s: float
    host_bytes_s: float
    network_bytes_s: float
    ssd_bytes_s: float


@dataclass(frozen=True, slots=True)
class Model:
    """parameters: those that a token meets. kv_bytes: of a token, in all layers."""

    source: str
    parameters: float
    weight_bytes: float
    layers: int
    width: int
    kv_bytes: int


Coefficients = tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class Speeds:
    """An engine: this model on this hardware. A roofline: a step takes what its arithmetic or its weights
    take, whichever is more, and what reading the context of decoded requests takes.

    measured: instead, what a router has: `coefficients`, `decode_coefficients` and `gpu_tokens`.
    """

    hardware: Hardware
    model: Model
    measured: tuple[Coefficients, Coefficients, int] | None = None

    def __post_init__(self) -> None:
        if self.gpu_tokens < 1:
            raise ConfigError("the model leaves no memory for KV on this hardware")

    @property
    def flop_s(self) -> float:
        return self.hardware.accelerators * self.hardware.flop_s * self.hardware.flop_share

    @property
    def memory_bytes_s(self) -> float:
        hardware = self.hardware
        return hardware.accelerators * hardware.memory_bytes_s * hardware.memory_share

    @property
    def gpu_tokens(self) -> int:
        """KV that fits beside the weights, a tenth of the memory left for other things."""
        if self.measured is not None:
            return self.measured[2]
        room = 0.9 * self.hardware.accelerators * self.hardware.memory_bytes
        return int((room - self.model.weight_bytes) / self.model.kv_bytes)

    @property
    def coefficients(self) -> Coefficients:
        """Seconds a step, a computed token, and a token that one attends to."""
        if self.measured is not None:
            return self.measured[0]
        model = self.model
        a_token = 2 * model.parameters / self.flop_s
        attended = 4 * model.layers * model.width / self.flop_s
        return self.hardware.step_s, a_token, attended

    @property
    def decode_coefficients(self) -> Coefficients:
        """The same for steps that only decode, while these are bound by memory."""
        if self.measured is not None:
            return self.measured[1]
        bandwidth = self.memory_bytes_s
        fixed_s = self.hardware.step_s + self.model.weight_bytes / bandwidth
        return fixed_s, 0.0, self.model.kv_bytes / bandwidth


def load_hardware(name: str) -> Hardware:
    """By name, or from a TOML file. Raises `ConfigError`."""
    return _load(Hardware, "hardware", name)


def load_model(name: str) -> Model:
    """By name, or from a TOML file. Raises `ConfigError`."""
    return _load(Model, "model", name)


def _folder(what: str) -> Any:
    return resources.files("kvpool.simulator") / "profiles" / what


def _names(what: str) -> list[str]:
    return sorted(file.name.removesuffix(".toml") for file in _folder(what).iterdir())


def _load(kind: type[T], what: str, name: str) -> T:
    if name.endswith(".toml"):
        if not Path(name).is_file():
            raise ConfigError(f"there is no {what} profile at {name}")
        text = Path(name).read_text()
    elif name in _names(what):
        text = (_folder(what) / f"{name}.toml").read_text()
    else:
        known = ", ".join(_names(what))
        raise ConfigError(
            f"there is no {what} profile {name!r}; known are {known}, or a .toml file"
        )
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"the {what} profile {name} is not TOML: {error}") from None
    expected = {field.name for field in fields(kind)}
    if values.keys() != expected:
        wrong = ", ".join(sorted(values.keys() ^ expected))
        raise ConfigError(f"the {what} profile {name} has missing or unknown fields: {wrong}")
    for key, value in values.items():
        if key != "source" and not (isinstance(value, int | float) and value > 0):
            raise ConfigError(f"{key} in the {what} profile {name} must be a number above 0")
    return kind(**values)
