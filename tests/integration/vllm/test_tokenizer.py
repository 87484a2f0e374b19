"""The router's own tokenizer beside `/tokenize` of vLLM, for the same files: of its server without an engine."""

from __future__ import annotations

import json
import random
import shutil
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from kvpool.errors import InvalidRequest
from kvpool.router.prompts.model_tokenizer import ModelTokenizer
from kvpool.router.prompts.tokens import question
from tests.integration.vllm.test_router import BENCH

SEED, BODIES = 19, 400
DOCUMENTS = Path(__file__).resolve().parents[3] / "docs"
SPECIALS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
TEMPLATE = """{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == "system" and not loop.first %}
        {{- raise_exception("A system message is the first one") }}
    {%- endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    {%- if message.role == 'assistant' %}
    {% generation %}{{ message['content'] | trim }}{% endgeneration %}
    {%- else %}
    {{- message['content'] }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if tools %}{{- tools | tojson }}{% endif %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""


@pytest.fixture(scope="module")
def model(kit: Any, llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny one, with a byte-level BPE of its vocabulary's size and a chat template."""
    folder = tmp_path_factory.mktemp("model") / "bpe"
    shutil.copytree(llama, folder)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = [AddedToken(each, special=True) for each in SPECIALS]
    trainer = trainers.BpeTrainer(
        vocab_size=kit.TINY.VOCABULARY,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text_of_documents()], trainer)
    begin = SPECIALS[0]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A", special_tokens=[(begin, tokenizer.token_to_id(begin))]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=SPECIALS[0], eos_token=SPECIALS[1]
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def url(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port = BENCH.free_port()
    command = [
        *BENCH.ENDS_WITH_PARENT,
        *(str(BENCH.VLLM_PYTHON), "-m", "vllm.entrypoints.launchers.render.entry"),
        *("--model", str(model), "--served-model-name", "m", "--host", "127.0.0.1"),
        *("--port", str(port), "--max-model-len", str(BENCH.MAX_TOKENS)),
    ]
    environment = BENCH.ENVIRONMENT | {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    child = BENCH.Child("server", command, tmp_path_factory.mktemp("t"), **environment)
    try:
        BENCH.wait_for_port(port, child)
        yield f"http://127.0.0.1:{port}"
    finally:
        child.process.terminate()
        child.stop()


def text_of_documents() -> str:
    return "".join(path.read_text() for path in sorted(DOCUMENTS.glob("*.md")))


def texts(draw: random.Random, documents: str) -> Iterator[str]:
    """Of documents, of any characters, of special tokens and white space."""
    while True:
        start = draw.randrange(len(documents))
        yield documents[start : start + draw.randrange(2000)]
        letters = [*range(1, 0x250), *range(0x4E00, 0x4E80), *range(0x1F600, 0x1F640)]
        yield "".join(map(chr, draw.choices(letters, k=draw.randrange(50))))
        yield draw.choice("  \n\t") * draw.randrange(4) + "<|im_start|>user\n x <s></s>"
        yield ""


def bodies(draw: random.Random) -> Iterator[tuple[dict[str, Any], str]]:
    """Requests, and their kinds."""
    text = texts(draw, text_of_documents())
    for number in range(BODIES):
        body: dict[str, Any] = {"model": "m"}
        if draw.random() < 0.3:
            body["add_special_tokens"] = draw.random() < 0.5
        if number % 3 == 0:
            yield body | {"prompt": next(text)}, "completions"
            continue
        roles = ["system"] * (draw.random() < 0.5) + ["user", "assistant"] * draw.randrange(4)
        roles.append(draw.choice(["user", "user", "assistant", "system"]))
        body["messages"] = [{"role": role, "content": next(text)} for role in roles]
        if draw.random() < 0.3:
            body["add_generation_prompt"] = draw.random() < 0.5
        if draw.random() < 0.3:
            body["chat_template_kwargs"] = {"enable_thinking": draw.random() < 0.5}
        yield body, "chat"


def tokens_of(url: str, asked: dict[str, Any]) -> list[int] | None:
    """The server's; None: it refuses."""
    data, headers = json.dumps(asked).encode(), {"Content-Type": "application/json"}
    try:
        request = urllib.request.Request(url + "/tokenize", data, headers)
        with urllib.request.urlopen(request, timeout=BENCH.ANSWER_S) as answer:
            found: list[int] = json.load(answer)["tokens"]
            return found
    except urllib.error.HTTPError as error:
        with error:
            if error.code != 400:
                raise
        return None


def test_it_makes_the_servers_tokens(model: Path, url: str) -> None:
    tokenizer = ModelTokenizer(str(model))
    equal = refused = 0
    for body, kind in bodies(random.Random(SEED)):
        asked = question(body, kind)
        assert isinstance(asked, dict)
        asked = {"model": "m", **asked}
        theirs = tokens_of(url, asked)
        try:
            assert tokenizer.encode(asked) == theirs, asked
            equal += 1
        except InvalidRequest:
            assert theirs is None, asked
            refused += 1
    assert equal > BODIES / 2 and refused, "the template refuses some chats"
