"""Profiles: all that ship are whole; what is wrong in a file is named."""

from pathlib import Path
from typing import Any

import pytest

from kvpool.errors import ConfigError
from kvpool.simulator.bound import scale_for, service_s
from kvpool.simulator.speeds import (
    Speeds,
    load_hardware,
    load_model,
)
from kvpool.simulator.traces import Entry, arrivals
from tests.support.central_queue import central_queue

PROFILES = Path(__file__).resolve().parents[3] / "kvpool" / "simulator" / "profiles"


@pytest.mark.parametrize("hardware", [file.stem for file in PROFILES.glob("hardware/*.toml")])
@pytest.mark.parametrize("model", [file.stem for file in PROFILES.glob("model/*.toml")])
def test_every_profile_is_usable_and_says_where_it_is_from(hardware: str, model: str) -> None:
    speeds = Speeds(load_hardware(hardware), load_model(model))
    assert len(speeds.hardware.source) > 100
    assert len(speeds.model.source) > 50
    # Computing is dearer than what it saves: reading the KV that it makes.
    a_token_s = speeds.coefficients[1]
    assert speeds.gpu_tokens > 100_000
    assert 1e-6 < a_token_s < 1e-3
    assert a_token_s > speeds.model.kv_bytes / speeds.hardware.network_bytes_s


def test_a_block_of_llama_on_a800_takes_what_the_eviction_bench_says() -> None:
    speeds = Speeds(load_hardware("a800x8"), load_model("llama-3-70b"))
    assert service_s(speeds, 512, 0, 512) == pytest.approx(0.058 + 0.004, rel=0.02)
    deeper = service_s(speeds, 1024, 1, 512) - service_s(speeds, 512, 0, 512)
    assert deeper == pytest.approx(0.00055, rel=0.02)


@pytest.mark.parametrize(
    "text",
    ["", "width = ", 'source = "x"\nparameters = 1', "layers = -1"],
)
def test_wrong_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "m.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="model profile"):
        load_model(str(path))
    with pytest.raises(ConfigError):
        load_model(str(tmp_path / "absent.toml"))
    with pytest.raises(ConfigError, match="llama"):
        load_model("gpt")


def test_values_must_be_positive_numbers(tmp_path: Path) -> None:
    good = "source='x'\nparameters=1\nweight_bytes=1\nlayers=1\nwidth=1\nkv_bytes=1\n"
    path = tmp_path / "m.toml"
    path.write_text(good)
    assert load_model(str(path)).layers == 1
    path.write_text(good.replace("layers=1", "layers=0"))
    with pytest.raises(ConfigError, match="layers"):
        load_model(str(path))


def test_a_model_must_fit() -> None:
    model = load_model("llama-3-70b")
    small = load_hardware("a800x8")
    with pytest.raises(ConfigError, match="no memory"):
        Speeds(type(small)(**{**as_dict(small), "memory_bytes": 10e9}), model)


def as_dict(hardware: Any) -> dict[str, Any]:
    return {name: getattr(hardware, name) for name in hardware.__slots__}


def test_the_bound_is_a_queue_in_order_over_an_infinite_cache() -> None:
    speeds = Speeds(load_hardware("a800x8"), load_model("llama-3-8b"))
    entries = [Entry(0.0, 512 * 20, 1, tuple(range(20))) for _ in range(3)]
    requests = arrivals(entries, 0)
    first = service_s(speeds, 512 * 20, 0, 2048)
    again = service_s(speeds, 512 * 20, 20, 2048)
    one = central_queue(requests, speeds, 1, 2048)
    ends = []
    free = 0.0
    for request, service in zip(requests, (first, again, again), strict=True):
        free = max(free, request.arrived_s) + service
        ends.append(free - request.arrived_s)
    assert one == pytest.approx(ends)
    assert central_queue(requests, speeds, 3, 2048) == pytest.approx([first, again, again])


def test_load_is_the_share_of_what_engines_can_do() -> None:
    speeds = Speeds(load_hardware("a800x8"), load_model("llama-3-8b"))
    entries = [Entry(3.0 * n, 5120, 1, tuple(range(10 * n, 10 * n + 10))) for n in range(50)]
    requests = arrivals(entries, 0)
    scale = scale_for(requests, speeds, 4, 2048, 0.5)
    scaled = arrivals(entries, 0, scale)
    work_s = 50 * service_s(speeds, 5120, 0, 2048)
    span_s = scaled[-1].arrived_s - scaled[0].arrived_s
    assert work_s / (4 * span_s) == pytest.approx(0.5)
