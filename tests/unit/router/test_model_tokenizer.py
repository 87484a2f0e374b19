"""What a model's own files make of prompts; the oracle is written out by hand, or another implementation's."""

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors

from kvpool.errors import ConfigError, InvalidRequest
from kvpool.router.prompts.model_tokenizer import CHARACTERS_MAX, ModelTokenizer
from tests.support.stub_engine.files import write_files
from tests.support.stub_engine.tokens import chat_tokens, tokens_of

WORDS = {"the": 0, "cat": 1, "sat": 2, "<s>": 3, "User:": 4, "Bot:": 5, "System:": 6, "quiet": 7}
TEMPLATE = """{{ bos_token }}
{%- for message in messages -%}
    {%- if message.content == "raise" %}{{ raise_exception("not this") }}{% endif -%}
    {{ {"user": " User: ", "assistant": " Bot: ", "system": " System: "}[message['role']] }}{{ message['content'] | trim }}
{%- endfor %}
{%- if tools %} tools{% endif %}
{%- if quiet is defined and quiet %} quiet{% endif %}
{%- if add_generation_prompt %} Bot:{% endif %}"""
USER = {"role": "user", "content": "the cat"}


def files(folder: Path, template: str | None = TEMPLATE, **config: object) -> Path:
    """A model whose tokens are whole words; others are not known to it at all."""
    tokenizer = Tokenizer(models.WordLevel(WORDS))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 3)]
    )
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=9, pad_id=0)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "chat_template": template} | config
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_completions(tmp_path):
    encode = ModelTokenizer(str(files(tmp_path))).encode
    assert encode({"model": "m", "prompt": "the cat sat the cat"}) == [3, 0, 1, 2, 0, 1]
    asked = {"model": "m", "prompt": "the cat", "add_special_tokens": False}
    assert encode(asked) == [0, 1]
    assert encode({"model": "m", "prompt": ""}) == [3]
    # The engine says what is wrong with these, or can do more.
    assert encode(asked | {"add_special_tokens": "yes"}) is None
    assert encode(asked | {"prompt": "the " * CHARACTERS_MAX}) is None


@pytest.mark.parametrize(
    ("asked", "tokens"),
    [
        ({"messages": [USER]}, [3, 4, 0, 1, 5]),
        ({"messages": [USER], "add_generation_prompt": False}, [3, 4, 0, 1]),
        ({"messages": [USER], "add_special_tokens": True}, [3, 3, 4, 0, 1, 5]),
        (
            {
                "messages": [
                    {"role": "system", "content": " sat\n"},
                    USER,
                    {"role": "assistant", "content": ""},
                ]
            },
            [3, 6, 2, 4, 0, 1, 5, 5],
        ),
        ({"messages": [USER], "chat_template_kwargs": {"quiet": True}}, [3, 4, 0, 1, 7, 5]),
        ({"messages": [USER], "chat_template_kwargs": {}}, [3, 4, 0, 1, 5]),
    ],
)
def test_chats(tmp_path, asked, tokens):
    assert ModelTokenizer(str(files(tmp_path))).encode({"model": "m", **asked}) == tokens


@pytest.mark.parametrize(
    "asked",
    [
        {"messages": []},
        {"messages": [USER], "tools": [{"type": "function"}]},
        {"messages": [USER], "continue_final_message": True},
        {"messages": [USER], "chat_template": "x"},
        {"messages": [USER], "add_generation_prompt": 1},
        {"messages": [USER], "chat_template_kwargs": {"loud": True}},
        {"messages": [USER], "chat_template_kwargs": {"tools": ["x"]}},
        {"messages": [USER], "chat_template_kwargs": {"bos_token": "x"}},
        {"messages": [USER], "chat_template_kwargs": "x"},
        {"messages": [USER | {"name": "x"}]},
        {"messages": [USER | {"content": [{"type": "text", "text": "the"}]}]},
        {"messages": [USER | {"content": None}]},
        {"messages": [{"role": "tool", "content": "the"}]},
        {"messages": [{"role": "developer", "content": "the"}]},
        {"messages": [{"role": "assistant", "content": "the", "tool_calls": []}]},
        {"messages": [{"role": "system", "content": "x-anthropic-billing-header: 1\nthe"}]},
        {"messages": ["the"]},
    ],
)
def test_chats_of_which_an_engine_makes_more(tmp_path, asked):
    assert ModelTokenizer(str(files(tmp_path))).encode({"model": "m", **asked}) is None


def test_what_the_model_refuses(tmp_path):
    encode = ModelTokenizer(str(files(tmp_path))).encode
    with pytest.raises(InvalidRequest, match="UNK"):
        encode({"model": "m", "prompt": "the dog"})
    with pytest.raises(InvalidRequest, match="not this"):
        encode({"model": "m", "messages": [{"role": "user", "content": "raise"}]})


def test_templates_see_no_more_than_they_should(tmp_path):
    """They come with models, from anywhere."""
    for source in (
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
    ):
        encode = ModelTokenizer(str(files(tmp_path, source))).encode
        with pytest.raises(InvalidRequest):
            encode({"model": "m", "messages": [USER]})


def test_where_templates_are(tmp_path):
    asked = {"model": "m", "messages": [USER]}
    assert ModelTokenizer(str(files(tmp_path, None))).encode(asked) is None
    named = [{"name": "tool_use", "template": "sat"}, {"name": "default", "template": "cat"}]
    assert ModelTokenizer(str(files(tmp_path, named))).encode(asked) == [1]
    token = {"content": "the", "special": True}
    folder = files(tmp_path, "{{ bos_token }}", bos_token=token)
    assert ModelTokenizer(str(folder)).encode(asked) == [0]
    marked = "{% generation %}{{ messages[0].content }}{% endgeneration %} sat"
    (tmp_path / "chat_template.jinja").write_text(marked)
    assert ModelTokenizer(str(tmp_path)).encode(asked) == [0, 1, 2]


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("tokenizer.json", None, "cannot read"),
        ("tokenizer.json", "{}", "is not a tokenizer"),
        ("tokenizer_config.json", "{", "cannot read"),
        ("tokenizer_config.json", "[]", "cannot read"),
        ("tokenizer_config.json", '{"chat_template": [{"name": "default"}]}', "cannot read"),
        ("tokenizer_config.json", '{"chat_template": 1}', "cannot read"),
        ("tokenizer_config.json", '{"chat_template": "a", "bos_token": {}}', "cannot read"),
        ("chat_template.jinja", "{% for %}", "template"),
    ],
)
def test_files_that_are_none(tmp_path, name, text, says):
    files(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=says):
        ModelTokenizer(str(tmp_path))


TEXTS = ("", "hello wörld \n\t <|end|> 漢字 \x00", "<|user|>x<|image|> ", " a  b ")


@pytest.mark.parametrize("text", TEXTS)
def test_the_stub_engines_files_make_its_tokens(tmp_path, text):
    encode = ModelTokenizer(str(write_files(tmp_path))).encode
    assert encode({"model": "m", "prompt": text}) == tokens_of(text)
    messages = [{"role": "system", "content": text}, {"role": "user", "content": "x" + text}]
    assert encode({"model": "m", "messages": messages}) == chat_tokens(messages)[0]
