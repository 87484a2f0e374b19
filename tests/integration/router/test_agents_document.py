"""What docs/agents.md says to a router is done, and its engine hears of the sessions."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.documents import blocks, commands, printed

AGENTS = Path(__file__).resolve().parents[3] / "docs" / "agents.md"
ROUTER = "http://127.0.0.1:8080"
TOLD = [
    {"id": "chat-1"},
    {"id": "chat-2", "shared": True},
    {"id": "chat-3", "agent": "planner"},
    {"id": "chat-4"},
    {"id": "chat-1", "end": True},
]


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
async def test_its_commands(world: Any) -> None:
    engine = await world.engine(model="m")
    await world.router()
    consoles = [block for block in blocks(AGENTS) if block.language == "console"]
    said = []
    for command in (command for block in consoles for command in commands(block)):
        assert ROUTER in command.text
        process = await asyncio.create_subprocess_shell(
            command.text.replace(ROUTER, world.url), stdout=asyncio.subprocess.PIPE
        )
        out, _ = await process.communicate()
        said.append(out.decode())
    *answers, ended = said
    for answer in answers:
        assert json.loads(answer)["choices"][0]["message"]["content"]
    (shown,) = (line for block in consoles for line in printed(block))
    assert ended == shown
    told = [seen.body["kv_transfer_params"]["kvpool_session"] for seen in world.asked(engine)]
    assert told == TOLD
