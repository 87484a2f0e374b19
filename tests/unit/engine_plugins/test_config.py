"""kv_connector_extra_config: typed, checked, and clear about what is wrong."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from kvpool.engine_plugins.vllm.config import LoadMode, PluginConfig
from kvpool.errors import ConfigError


def test_nothing_given_is_the_default() -> None:
    assert PluginConfig.from_given(None) == PluginConfig() == PluginConfig.from_given({})


def test_values_take_the_settings_types() -> None:
    config = PluginConfig.from_given(
        {"lease_s": 3, "load_mode": "sync", "sync_load_bytes": 4096.0, "epoch": 7, "socket": "/s"}
    )
    assert config.lease_s == 3.0
    assert isinstance(config.lease_s, float)
    assert config.load_mode is LoadMode.SYNC
    assert config.sync_load_bytes == 4096
    assert config.epoch == "7"
    assert config.socket == "/s"


def test_what_is_on_can_be_switched_off() -> None:
    assert PluginConfig().attach_device
    assert not PluginConfig.from_given({"attach_device": False}).attach_device


def test_it_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        PluginConfig().lease_s = 1.0


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"lease_seconds": 3}, "no setting 'lease_seconds'"),
        ({"lease_s": 0}, "'lease_s'"),
        ({"lease_s": "10"}, "must be a number"),
        ({"lease_s": True}, "must be a number"),
        ({"sync_load_bytes": 1.5}, "whole number"),
        ({"sync_load_bytes": -1}, "at least 0"),
        ({"load_mode": "lazy"}, "auto, async, sync"),
        ({"pin_share": 0.2}, "at most 0.1"),
        ({"pin_share": 0}, "more than 0"),
        ({"min_load_blocks": 0}, "at least 1"),
        ({"resave_s": -1}, "at least 0"),
        ({"pull_wait_s": -1}, "at least 0"),
        ({"pulls_max": 0}, "at least 1"),
        ({"pulls_max": 1000}, "at most 16"),
        ({"attach_device": "no"}, "true or false"),
        ({"attach_device": 0}, "true or false"),
        ({"socket": 5}, "must be a string"),
        ({"tenant": None}, "must be a string"),
        ({"url": "http://h:8000/v1"}, "leave out /v1"),
        ({"url": "http://h:8000/v1/"}, "leave out /v1"),
    ],
)
def test_what_is_wrong_is_named(extra: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        PluginConfig.from_given(extra)
