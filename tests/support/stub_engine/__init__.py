"""A stand-in for vLLM's API server: no model, but real HTTP, prefix hashes, KV events, batching and time.

    async with StubEngine(Settings(events="tcp://127.0.0.1:5557")) as engine:
        ...                                       # engine.url

`python -m tests.support.stub_engine --port 8000` is one in a process of its own, which can be killed.

What it answers follows from the prompt alone (`tokens.answer`), so a wrong answer is seen. Stub engines may
share a folder in place of a pool (`Settings.pool`): what one has computed the others load, also while it
computes (`kv_transfer_params`). `serving` has the endpoints, `faults` what can be made to go wrong.
"""

from tests.support.stub_engine.core import Speed
from tests.support.stub_engine.faults import Fault
from tests.support.stub_engine.serving import Settings, StubEngine

__all__ = ["Fault", "Settings", "Speed", "StubEngine"]
