"""What the router answers beside what vLLM answers: the same requests to both, field by field, by several clients.

The engines are one that prefills, one that decodes, and one of embeddings; the router's answers are compared with those of
the engine that decodes, or of embeddings. Each request is sent to that engine once before, so that both find it cached.

`docs/answers.md` states the differences of `answer_cases`.
"""

from __future__ import annotations

import contextlib
import http.client
import inspect
import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # nothing is looked up

from kvpool.router.prompts.tokens import question
from tests.integration.vllm.test_router import BENCH
from tests.support.answer_cases import ADAPTER, EMBEDDING, MODEL, SECOND, all_cases, of_embeddings
from tests.support.answers import Answer, Case, differences, flat, joined, unstated

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import litellm
    import openai

ROOT = Path(__file__).resolve().parents[3]
PATIENCE_S = 180.0
BENCH_PROMPTS = 8

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

litellm.suppress_debug_info = True


@dataclass(frozen=True)
class Site:
    """The URLs of the engine that decodes, of that of embeddings, and of the router before them; and the model's folder."""

    decode: str
    embeddings: str
    router: str
    model: Path

    def engine(self, case: Case) -> str:
        return self.embeddings if of_embeddings(case) else self.decode


@contextmanager
def embedding_server(folder: Path, model: Path) -> Iterator[tuple[str, Any]]:
    """A server of embeddings, without a pool: its URL, and its process. It is starting yet."""
    port = BENCH.free_port()
    command = [
        *BENCH.ENDS_WITH_PARENT,
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(model), "--served-model-name", EMBEDDING, "--seed", "0"),
        *("--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager"),
        *("--max-model-len", str(BENCH.MAX_TOKENS), "--runner", "pooling", "--convert", "embed"),
        *("--kv-cache-memory-bytes", str(BENCH.KV_BYTES), "--enable-request-id-headers"),
    ]
    environment = BENCH.ENVIRONMENT | {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    child = BENCH.Child("embeddings", command, folder, **environment)
    try:
        yield f"http://127.0.0.1:{port}", child
    finally:
        child.process.terminate()
        child.stop()


@pytest.fixture(scope="module")
def site(kit: Any, models: Callable[[str], Path], tmp_path_factory: Any) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("r")
    model = models("chat")
    adapter = kit.TINY.make_adapter(folder / "adapter")
    flags = (
        *("--served-model-name", MODEL, SECOND, "--dtype", "float32"),
        *("--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"{ADAPTER}={adapter}"),
        *("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--enable-scale-out"),
    )
    with ExitStack() as stack:
        socket = stack.enter_context(kit.run_daemon(folder)).socket
        servers = [
            stack.enter_context(BENCH.ApiServer(role, model, folder, socket, role, *flags))
            for role in ("prefill", "decode")
        ]
        embeddings, child = stack.enter_context(embedding_server(folder, model))
        for server in servers:
            server.wait_ready()
        BENCH.wait_for_port(urlsplit(embeddings).port, child)
        roles = [f"{each.url},role={each.name}" for each in servers]
        named = [word for engine in (*roles, embeddings) for word in ("--engine", engine)]
        url = stack.enter_context(BENCH.router(folder, "router", socket, *named))
        found = Site(servers[1].url, embeddings, url, model)
        kit.until(lambda: known(found), "the router knows all models, and the engines' hashes")
        yield found


def known(site: Site) -> bool:
    listed = ask(site.router, Case("", "/v1/models", method="GET")).value["data"]
    engines = ask(site.router, Case("", "/engines", method="GET")).value["knowledge"]["engines"]
    verified = [each for each in engines.values() if each["hashes"] == "verified"]
    return {each["id"] for each in listed} == {MODEL, SECOND, ADAPTER, EMBEDDING} and (
        len(verified) == 2
    )


def ask(url: str, case: Case) -> Answer:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=PATIENCE_S)
    with contextlib.closing(connection):
        headers = {"Content-Type": "application/json", **case.headers}
        connection.request(case.method, case.path, case.data, headers)
        answer = connection.getresponse()
        received = {name.lower(): text for name, text in answer.getheaders()}
        return Answer(answer.status, received, answer.read())


def test_answers_are_those_of_the_engines_but_for_what_is_stated(site: Site) -> None:
    wrong = []
    for case in all_cases():
        ask(site.engine(case), case)
        through, direct = ask(site.router, case), ask(site.engine(case), case)
        found = differences(direct, through)
        new, gone = unstated(case, found)
        wrong += [f"{case.path}, {case.name}: {name}: {found[name]}" for name in new]
        wrong += [
            f"{case.path}, {case.name}: {name} is stated, and does not differ" for name in gone
        ]
    assert not wrong, "\n".join(wrong)


# ---- prompts that the router learns --------------------------------------------------------------


def post(url: str, path: str, body: dict[str, Any]) -> Any:
    answer = ask(url, Case("", path, body))
    assert answer.status == 200, answer.body
    return answer.value


def test_prompts_of_messages_and_responses_are_known_token_for_token(site: Site) -> None:
    """The engine's own rendering is the oracle; what is no chat for the router is one that it leaves to the engine."""
    learnt = {"/v1/messages": 0, "/v1/responses": 0}
    for case in all_cases():
        if case.path not in learnt or not isinstance(case.body, dict) or case.body.get("stream"):
            continue
        rendered = ask(site.decode, Case("", f"{case.path}/render", case.body))
        if rendered.status != 200:
            continue
        asked = question(case.body, case.path.removeprefix("/v1/"))
        assert isinstance(asked, dict), case.name
        asked["model"] = case.body["model"]
        assert post(site.decode, "/tokenize", asked)["tokens"] == rendered.value["token_ids"], (
            case.name
        )
        learnt[case.path] += 1
    assert min(learnt.values()) >= 8


def test_what_is_no_chat_for_the_router_is_rendered_by_an_engine(site: Site, kit: Any) -> None:
    """A tool of another kind; images would come this way as well."""
    body = {
        "model": MODEL,
        "input": "A prompt of some blocks, with a tool that takes text. " * 4,
        "tools": [{"type": "custom", "name": "poem", "description": "Takes any text."}],
        "max_output_tokens": 2,
    }
    assert question(body, "responses") is None
    case = Case("", "/v1/responses", body, headers={"X-Request-Id": "rendered"})
    answer = ask(site.router, case)
    assert answer.status == 200, answer.body
    told = ask(site.router, Case("", "/explain/rendered", method="GET")).value
    usage = answer.value["usage"]
    assert told["prompt_tokens"] == usage["input_tokens"]
    assert told["prompt_blocks"] == usage["input_tokens"] // BENCH.BLOCK_TOKENS >= 6


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
def test_blocks_of_messages_and_responses_are_found(site: Site, kit: Any, path: str) -> None:
    text = f"A prompt of some blocks for {path}, which no other test has sent before. " * 3
    body: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_output_tokens": 4, "input": text}
    if path == "/v1/messages":
        body = {"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": text}]}

    def found() -> bool:
        """Whether it is sent to where its blocks are: an engine's events are not there at once."""
        headers = {"X-Request-Id": f"again{path.replace('/', '-')}"}
        answer = ask(site.router, Case("", path, body, headers=headers))
        assert answer.status == 200
        told = ask(site.router, Case("", f"/explain/{headers['X-Request-Id']}", method="GET")).value
        usage = answer.value["usage"]
        kinds = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
        assert told["prompt_tokens"] == sum(usage.get(kind) or 0 for kind in kinds)
        blocks = told["prompt_tokens"] // BENCH.BLOCK_TOKENS
        assert told["prompt_blocks"] == blocks >= 6
        (order,) = [step for step in told["steps"] if step["what"] == "order"]
        return bool(order["expected"]["cached_blocks"] >= blocks - 1)

    kit.until(found, "the blocks are found")


# ---- clients -------------------------------------------------------------------------------------


def said_of(call: Callable[[], Any]) -> dict[str, Any]:
    """What a client makes of an answer, a stream or a refusal: its fields."""
    try:
        answer = call()
        if hasattr(answer, "model_dump"):
            return dict(flat("", answer.model_dump()))
        chunks = joined([("", chunk.model_dump()) for chunk in answer])
        return dict(flat("", [chunk for _, chunk in chunks]))
    except openai.APIError as error:  # also of litellm
        told = re.sub(r"\b(chatcmpl|cmpl|resp|msg)[-_]\w+", "an id", str(error))
        return {
            "refused": type(error).__name__,
            "status": getattr(error, "status_code", None),
            "says": told,
        }


def compared(
    site: Site, calls: Callable[[str], dict[str, Callable[[], Any]]], *chance: str
) -> list[str]:
    """Calls by their names, to the engine and to the router: what differs, but for what was in caches, and for fields
    of streams that the client fills by chance.
    """
    wrong = []
    routers = calls(site.router)
    for name, direct in calls("").items():
        one, other = said_of(direct), said_of(routers[name])
        wrong += [
            f"{name}: {field}: {one.get(field)!r}, {other.get(field)!r}"
            for field in sorted({*one, *other})
            if one.get(field) != other.get(field)
            and "prompt_tokens_details" not in field
            and not (field.startswith("[") and field.endswith(chance))
        ]
    return wrong


def objects(*paths: str) -> list[Case]:
    """The cases of these paths whose refusals are not the router's own."""
    return [
        case
        for case in all_cases()
        if case.path in paths and isinstance(case.body, dict) and not case.differs
    ]


def through_openai(client: Any, case: Case) -> Callable[[], Any] | None:
    """The call of the SDK for a case; None: it does not make such a one."""
    create = {
        "/v1/completions": client.completions.create,
        "/v1/chat/completions": client.chat.completions.create,
        "/v1/responses": client.responses.create,
        "/v1/embeddings": client.embeddings.create,
    }[case.path]
    names = inspect.signature(create).parameters
    required = {"/v1/completions": "prompt", "/v1/chat/completions": "messages"}.get(
        case.path, "input"
    )
    body = dict(case.body)
    if required not in body or "bytes" in str(body.get("encoding_format")):
        return None
    own = {name: body.pop(name) for name in list(body) if name in names}
    return lambda: create(**own, extra_body=body)


def test_the_openai_sdk_sees_no_difference(site: Site) -> None:
    cases = objects("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings")

    def calls(router: str) -> dict[str, Callable[[], Any]]:
        found = {}
        for case in cases:
            url = f"{router or site.engine(case)}/v1"
            client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=PATIENCE_S)
            if (call := through_openai(client, case)) is not None:
                found[f"{case.path}, {case.name}"] = call
        return found

    assert len(calls("")) > 100
    wrong = compared(site, calls)
    assert not wrong, "\n".join(wrong)


def through_litellm(case: Case) -> Callable[..., Any] | None:
    """The call of litellm for a case; None: it does not make such a one."""
    provider, function, needs, kinds = {
        "/v1/chat/completions": ("hosted_vllm", litellm.completion, "messages", list),
        "/v1/completions": ("text-completion-openai", litellm.text_completion, "prompt", str),
        "/v1/embeddings": ("hosted_vllm", litellm.embedding, "input", list | str),
    }[case.path]
    given = case.body.get(needs)
    if not given or not isinstance(given, kinds) or (case.body.get("stream") and needs == "prompt"):
        return None
    if needs == "messages" and not all(map(_is_message, given)):
        return None
    body = {**case.body, "model": f"{provider}/{case.body['model']}"}
    return partial(function, **body, api_key="none", num_retries=0, timeout=PATIENCE_S)


def _is_message(given: Any) -> bool:
    """Whether it is one of which litellm has no doubts of its own."""
    if not isinstance(given, dict) or given.get("role") not in (
        "system",
        "user",
        "assistant",
        "tool",
    ):
        return False
    content = given.get("content")
    parts = content if isinstance(content, list) else []
    return isinstance(content, str | list | None) and all(
        part.get("type") != "no" for part in parts
    )


def test_litellm_sees_no_difference(site: Site) -> None:
    cases = objects("/v1/completions", "/v1/chat/completions", "/v1/embeddings")

    def calls(router: str) -> dict[str, Callable[[], Any]]:
        return {
            f"{case.path}, {case.name}": partial(call, api_base=f"{router or site.engine(case)}/v1")
            for case in cases
            if (call := through_litellm(case)) is not None
        }

    assert len(calls("")) > 90
    # Which chunks have it depends on how tokens came together. By HTTP it is compared.
    wrong = compared(site, calls, "system_fingerprint")
    assert not wrong, "\n".join(wrong)


# ---- vLLM's own bench ----------------------------------------------------------------------------

# The CPU build is a distribution of another name, which vLLM's command does not look for.
VLLM = """
import importlib.metadata as metadata
import sys
version = metadata.version
metadata.version = lambda name: f"{version('vllm-cpu')}+cpu" if name == "vllm" else version(name)
from vllm.entrypoints.cli.main import main
sys.exit(main())
"""


@pytest.mark.parametrize(
    ("backend", "path"),
    [("openai-chat", "/v1/chat/completions"), ("openai", "/v1/completions")],
)
def test_the_bench_of_vllm_runs_without_an_error(
    site: Site, backend: str, path: str, tmp_path: Path
) -> None:
    command = [
        *(sys.executable, "-c", VLLM, "bench", "serve", "--backend", backend, "--endpoint", path),
        *("--base-url", site.router, "--model", MODEL, "--tokenizer", str(site.model)),
        *("--dataset-name", "random", "--num-prompts", str(BENCH_PROMPTS)),
        *("--random-input-len", "80", "--random-output-len", "8", "--ignore-eos"),
        *("--save-result", "--result-dir", str(tmp_path), "--result-filename", "result.json"),
    ]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["failed"]) == (BENCH_PROMPTS, 0)
    assert result["total_output_tokens"] == BENCH_PROMPTS * 8
