"""A request's hint about its prompt: another engine is computing it now, and waiting is worth it.

    kv_transfer_params={"kvpool": {"follow_s": 30, "source": "node-a"}}

The decode engine gets the request while the other one still computes the prompt, and its node pulls
the blocks one by one as they are committed there, so that at the end only the last ones are missing.

To a request with

    kv_transfer_params={"kvpool": {"report": true}}

the answer says what became of its prompt's blocks (`SaveReport`), in a field of the same name.

Fields that are not known here are ignored: a newer router may say more.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from kvpool.errors import InvalidRequest

FOLLOW_S_MAX = 600.0


class Following(msgspec.Struct, frozen=True):
    """follow_s: how long the prompt is waited for at most. source: name of the node where it is computed, if known.

    computed: all of it is computed, and the rest is being saved: the wait is a short one, as for a pull.
    """

    follow_s: Annotated[float, msgspec.Meta(gt=0, le=FOLLOW_S_MAX)]
    source: Annotated[str, msgspec.Meta(max_length=256)] = ""
    computed: bool = False


class SaveReport(msgspec.Struct, frozen=True):
    """How much of a prompt, from its beginning, is in the pool when its answer is sent. What is in neither count was
    not saved, and will not be.

    saved_tokens: are there. saving_tokens: behind these, are on their way; `saving_s`: for about so long still, by
    earlier saves; None: there were none.
    """

    saved_tokens: int
    saving_tokens: int
    saving_s: float | None


def wants_report(params: Mapping[str, object] | None) -> bool:
    """Whether a request's `kv_transfer_params` ask for a `SaveReport`."""
    given = (params or {}).get("kvpool")
    return isinstance(given, Mapping) and given.get("report") is True


def following(params: Mapping[str, object] | None) -> Following | None:
    """What a request's `kv_transfer_params` say; None: nothing. Raises `InvalidRequest`."""
    given: Any = (params or {}).get("kvpool")
    if given is None or (wants_report(params) and "follow_s" not in given):
        return None
    try:
        return msgspec.convert(given, Following)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f'kv_transfer_params["kvpool"]: {error}') from None
