"""The facts that must agree before one engine uses the KV of another, in whatever form it is stored.

Engines name blocks by their tokens (and LoRA adapter, salt, images), never by the model or by how it computes. `Facts`
declares the rest, each fact once. The plugin of an engine reads them from the engine's objects, and adds what belongs to
the form in which it stores KV: cache groups, pages, ranks.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

RELEASE_NUMBERS = {"vllm": 2, "sglang": 3}
"""How many numbers of a version name a release: vLLM 0.32.0 and 0.32.1 are one, SGLang 0.5.22 and 0.5.23 are two."""
FIXED_POSITIONS = frozenset(
    {
        "default",
        "linear",
        "llama3",
        "yarn",
        "deepseek_yarn",
        "deepseek_llama_scaling",
        "ntk",
        "mrope",
        "bailing_mrope",
        "proportional",
        "mllama4",
        "openpangu",
    }
)
"""Types of rotary positions that are the same for every length that an engine allows."""
LENGTH_SETTINGS = frozenset({"dual_chunk_attention_config", "attn_temperature_tuning"})
"""Settings of a model whose effect may depend on that length, whatever the type of its positions."""

WRITTEN = (
    "_name_or_path",
    "transformers_version",
    "max_model_len",
    "context_len",
    "encoder_only",
    "language_only",
    "language_model_only",
)
"""Items that engines write into a model's configuration, and that change no KV."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What an engine computes KV with. Values are JSON, the same in each process of equal engines."""

    engine: str
    # Versions of the engine, and of Python, with which KV is shared: see `versions`.
    versions: Mapping[str, str]
    # The name that the user gives the model, else the path or id that the engine was given.
    model: str
    # The commit that was loaded from a hub, or the branch if the commit is not known.
    revision: str | None
    # The same of the model's own code, if that is from another revision.
    code_revision: str | None
    # Samples of the checkpoint's tensors, or the name of weights that have replaced them.
    weights: Any
    # The digest of the model's configuration, with all overrides.
    config: str
    # Classes that the engine uses in place of those that the configuration names.
    classes: Mapping[str, str]
    dtype: str
    quantization: str | None
    # Everything that the engine was told of how to quantise, beside the method.
    quantization_config: Any
    kv_cache_dtype: str
    # How the platform reads 8-bit floats, if the KV has any: AMD's MI300 reads other values than all others.
    fp8: str | None
    # How positions become rotations: see `positions` of vllm/positions.py, and `length_matters`.
    positions: Any
    device: Sequence[str]
    # The draft model whose KV is stored beside the target's; None if drafts have no KV.
    speculative: Any
    # How images and other media become what the model sees.
    multimodal: Any
    # Settings of one engine that change its KV, or the bytes of the same KV.
    settings: Mapping[str, Any]
    tenant: str
    epoch: str

    def fields(self) -> dict[str, Any]:
        """Return the facts by name, for a namespace's record."""
        return {each.name: plain(getattr(self, each.name)) for each in dataclasses.fields(self)}


def versions(engine: str, version: str, *, pickled: bool, any_version: bool) -> dict[str, str]:
    """Return the versions that must agree: the engine's release, since the next may lay out or compute KV in another way.

    pickled: whether block hashes are made of pickles, which Python and the engine may change with each version.
    any_version: whether the user shares KV with every version of the engine.
    """
    found = {"python": platform.python_version()} if pickled else {}
    if not any_version:
        found[engine] = version if pickled else release(engine, version)
    return found


def release(engine: str, version: str) -> str:
    """Return the numbers of a version that name its release; the version itself if it does not begin with numbers."""
    numbers = re.match(r"\d+(\.\d+)*", version)
    if numbers is None:
        return version
    return ".".join(numbers[0].split(".")[: RELEASE_NUMBERS[engine]])


def fp8_type(kv_cache_dtype: str, dtypes: Iterable[str], platform_type: str) -> str | None:
    """Return the type in which the platform reads 8-bit floats, or None if the KV has none.

    dtypes: of the stored tensors; engines keep 8-bit floats as `uint8` too.
    """
    eight_bits = any("float8" in each or "uint8" in each for each in dtypes)
    return platform_type if kv_cache_dtype.startswith("fp8") or eight_bits else None


def length_matters(config: Any, length: int) -> int | None:
    """Return the longest prompt that an engine allows if rotations may depend on it, else None.

    Takes the place of the rotations themselves where the model is not at hand. LongRoPE, for example, has long or short
    factors for all positions, by this length.
    config: the model's configuration, of transformers.
    """
    types: set[str] = set()
    others: set[str] = set()

    def look(value: Any, name: str = "") -> None:
        if isinstance(value, Mapping):
            if name in ("rope_parameters", "rope_scaling"):
                types.update(str(value[key]) for key in ("rope_type", "type") if value.get(key))
            for key, each in value.items():
                if key in LENGTH_SETTINGS and each:
                    others.add(key)
                # By layer type, the positions are one level further down.
                inner = "rope_parameters" if name == "rope_parameters" else str(key)
                look(each, inner)
        elif isinstance(value, (list, tuple)):
            for each in value:
                look(each)

    look(config.to_dict())
    tuned = str(getattr(config, "model_type", "")).startswith("llama4")
    return length if types - FIXED_POSITIONS or others or tuned else None


def config_digest(config: Any) -> str:
    """Return the digest of a model's configuration, of transformers.

    Without what engines write into it: places, versions, whether media are served, and the longest prompt that they
    allow. `Facts.positions` says what depends on that prompt.
    """
    return digest(config.to_dict(), drop=WRITTEN)


def file_digests(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Return the digests of those files that are in the folder."""
    return {
        name: hashlib.sha256((folder / name).read_bytes()).hexdigest()[:16]
        for name in names
        if (folder / name).is_file()
    }


def digest(value: Any, drop: Sequence[str] = ()) -> str:
    """Return the digest of a value of an engine's configuration, without the items of these names."""
    body = plain(value)
    if isinstance(body, dict):
        body = {key: item for key, item in body.items() if key not in drop}
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:16]


def plain(value: Any) -> Any:
    """Return a value of an engine's configuration as JSON, the same in every process.

    Objects that are not data are named by their type: their repr would hold an address.
    """
    if isinstance(value, Enum):
        return value.name
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = {
            field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
        return {"type": type(value).__name__, **items}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(json.dumps(plain(item), sort_keys=True) for item in value)
    if type(value).__module__ == "torch":
        return str(value)
    return type(value).__name__
