"""A model's chat template, for chats that need nothing but it: texts of the usual roles.

Rendered as `transformers` does, which vLLM calls: the same environment, the same names. What vLLM does to messages
before that (tools, calls of tools, parts, reasoning) is not repeated here; such chats are left to engines.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import jinja2
import jinja2.meta
import msgspec
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvpool.decoding import JsonDecoder
from kvpool.errors import ConfigError, InvalidRequest, ProtocolError

if TYPE_CHECKING:
    from jinja2.parser import Parser

FILE, CONFIG_FILE = "chat_template.jinja", "tokenizer_config.json"
ROLES = frozenset(("system", "user", "assistant"))
ASKED = frozenset(
    ("add_generation_prompt", "add_special_tokens", "chat_template_kwargs", "messages", "model")
)
"""The fields of a question that are understood here."""
SPECIAL_TOKENS = tuple(
    f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
)
SET_HERE = frozenset(("add_generation_prompt", "documents", "messages", "tools", *SPECIAL_TOKENS))
REWRITTEN = "x-anthropic-billing-header"
"""vLLM removes this line from the beginning of a system message."""

# What evaluating a template may raise, beside its own errors.
_RAISED = (
    *(jinja2.TemplateError, ArithmeticError, AttributeError, LookupError),
    *(RecursionError, TypeError, ValueError),
)


def local_time() -> datetime:
    """With this machine's time zone."""
    return datetime.now(UTC).astimezone()


class _Generation(Extension):
    """`{% generation %}`, which marks for training what an assistant said, and is otherwise not there."""

    tags = frozenset(("generation",))  # type: ignore[assignment]

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_said"), [], [], body).set_lineno(line)

    def _said(self, caller: Callable[[], str]) -> str:
        return caller()


class ChatTemplate:
    """Thread-safe."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        now: Callable[[], datetime] = local_time,
    ) -> None:
        """special_tokens: by their names in the template, such as `bos_token`. Raises `ConfigError`."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        try:
            self._template = environment.from_string(source)
            names = jinja2.meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateError as error:
            raise ConfigError(f"models: a chat template cannot be read: {error}") from None
        self._special_tokens = special_tokens
        self._choices = names - SET_HERE

    def render(self, asked: Mapping[str, Any]) -> str | None:
        """The prompt for a `tokens.question`; None: only an engine can tell. Raises `InvalidRequest`."""
        begin, chosen = asked.get("add_generation_prompt", True), asked.get("chat_template_kwargs")
        messages = asked["messages"]
        if not asked.keys() <= ASKED or type(begin) is not bool:
            return None
        if not messages or not all(map(_is_plain, messages)):
            return None
        if chosen is not None and not self._understands(chosen):
            return None
        try:
            return self._template.render(
                **self._special_tokens,
                **(chosen or {}),
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=begin,
            )
        except _RAISED as error:
            raise InvalidRequest(f"a chat template refuses a prompt: {error}") from None

    def _understands(self, chosen: Any) -> bool:
        """Whether the template reads all of them, and nothing else does."""
        return isinstance(chosen, dict) and chosen.keys() <= self._choices


class _Named(msgspec.Struct):
    name: str
    template: str


class _Content(msgspec.Struct):
    content: str


class _Config(msgspec.Struct):
    """The fields of `tokenizer_config.json` that are used here."""

    chat_template: str | list[_Named] | None = None
    bos_token: str | _Content | None = None
    eos_token: str | _Content | None = None
    unk_token: str | _Content | None = None
    sep_token: str | _Content | None = None
    pad_token: str | _Content | None = None
    cls_token: str | _Content | None = None
    mask_token: str | _Content | None = None


_decode_config = JsonDecoder[_Config](_Config, CONFIG_FILE)


def read_chat_template(folder: Path) -> ChatTemplate | None:
    """The one of a model's files; None: they have none. Raises `ConfigError`."""
    config = _Config()
    try:
        if (path := folder / CONFIG_FILE).exists():
            config = _decode_config(path.read_bytes())
        source = config.chat_template
        if (path := folder / FILE).exists():
            source = path.read_text(encoding="utf-8")
    except (OSError, ProtocolError, UnicodeDecodeError) as error:
        raise ConfigError(f"models: cannot read {path}: {error}") from None
    if isinstance(source, list):
        source = {each.name: each.template for each in source}.get("default")
    if source is None:
        return None
    tokens: dict[str, str] = {}
    for name in SPECIAL_TOKENS:
        token: str | _Content | None = getattr(config, name)
        if token:
            tokens[name] = token if isinstance(token, str) else token.content
    return ChatTemplate(source, tokens)


def _is_plain(message: object) -> bool:
    """Whether it is a text, and reaches the template as it is."""
    if not isinstance(message, dict) or message.keys() != {"role", "content"}:
        return False
    role, content = message["role"], message["content"]
    if role not in ROLES or not isinstance(content, str):
        return False
    return role != "system" or not content.startswith(REWRITTEN)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Without the HTML escapes of jinja2's own."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
