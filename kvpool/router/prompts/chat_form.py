"""Requests to `/v1/messages` and `/v1/responses` in the form of a chat, for their tokens. No I/O.

vLLM makes chats of them too, by its own code; what is made here is only for finding blocks, never sent to be answered. Where
the two differ, blocks are not found, and nothing worse. What is not understood is None: such a request is placed by load.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

BILLING = "x-anthropic-billing-header"
"""A text that begins so differs with each request: vLLM leaves it out of the prompt."""


class _Unknown(Exception):
    """Something that is not understood."""


_MALFORMED = (_Unknown, AttributeError, LookupError, RecursionError, TypeError)
"""What a body can do to code that takes it for well-formed: the engine says what is wrong with it."""


def of_messages(body: Mapping[str, Any]) -> dict[str, Any] | None:
    """Of a request to `/v1/messages`, or to count its tokens."""
    try:
        return _of_messages(body)
    except _MALFORMED:
        return None


def of_responses(body: Mapping[str, Any]) -> dict[str, Any] | None:
    """Of a request to `/v1/responses`. None if it continues a response that an engine stores."""
    if body.get("previous_response_id") is not None:
        return None
    try:
        return _of_responses(body)
    except _MALFORMED:
        return None


# ---- messages -------------------------------------------------------------------------------------


def _of_messages(body: Mapping[str, Any]) -> dict[str, Any]:
    messages: list[dict[str, Any]] = []
    if system := _system(body.get("system")):
        messages.append({"role": "system", "content": system})
    for message in body["messages"]:
        role, content = message["role"], message["content"]
        if role == "system":
            if text := _system(content):
                messages.append({"role": role, "content": text})
        elif isinstance(content, str):
            messages.append({"role": role, "content": content})
        else:
            _add_blocks(messages, role, content)
    chat: dict[str, Any] = {"messages": messages}
    if body.get("tools") is not None:
        chat["tools"] = [_tool(tool, "input_schema") for tool in body["tools"]]
    if body.get("chat_template_kwargs") is not None:
        chat["chat_template_kwargs"] = body["chat_template_kwargs"]
    effort = (body.get("output_config") or {}).get("effort")
    if (body.get("thinking") or {}).get("type") == "disabled":
        effort = "none"
    if effort is not None:
        chat["reasoning_effort"] = effort
    return chat


def _system(said: object) -> str:
    if isinstance(said, str):
        return said
    texts = [block["text"] for block in _list(said) if block["type"] == "text"]
    return "".join(text for text in texts if not text.startswith(BILLING))


def _add_blocks(messages: list[dict[str, Any]], role: str, blocks: Sequence[Any]) -> None:
    """The message that consists of these, behind the results of tools among them."""
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block in blocks:
        match block["type"]:
            case "text":
                texts += [block["text"]] if block["text"] else []
            case "thinking":
                thoughts.append(block["thinking"])
            case "redacted_thinking":
                pass
            case "tool_use":
                said = json.dumps(block.get("input") or {})
                calls.append(_call(block["id"], block["name"], said))
            case "tool_result" if role == "user":
                result = {"role": "tool", "tool_call_id": block.get("tool_use_id") or ""}
                messages.append({**result, "content": _result(block.get("content"))})
            case _:
                raise _Unknown
    message: dict[str, Any] = {"role": role}
    if thoughts:
        message["reasoning"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    if texts:
        parts = [{"type": "text", "text": text} for text in texts]
        message["content"] = texts[0] if len(texts) == 1 else parts
    if role != "user" or texts:
        messages.append(message)


def _result(content: object) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    blocks = _list(content)
    if any(block["type"] != "text" for block in blocks):
        raise _Unknown
    return "\n".join(block["text"] for block in blocks)


# ---- responses ------------------------------------------------------------------------------------


def _of_responses(body: Mapping[str, Any]) -> dict[str, Any]:
    messages: list[dict[str, Any]] = []
    if body.get("instructions"):
        messages.append({"role": "system", "content": body["instructions"]})
    given = body["input"]
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
    else:
        for item in _list(given):
            _add_item(messages, item)
    chat: dict[str, Any] = {"messages": messages}
    if body.get("tools"):
        if any(tool["type"] != "function" for tool in body["tools"]):
            raise _Unknown
        chat["tools"] = [_tool(tool, "parameters") for tool in body["tools"]]
    if body.get("chat_template_kwargs") is not None:
        chat["chat_template_kwargs"] = body["chat_template_kwargs"]
    if (effort := (body.get("reasoning") or {}).get("effort")) is not None:
        chat["reasoning_effort"] = effort
    return chat


def _add_item(messages: list[dict[str, Any]], item: Mapping[str, Any]) -> None:
    """A part of an assistant's turn is joined to what the turn has before it."""
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    kind = item.get("type", "message")
    if item.get("status") in ("in_progress", "incomplete"):
        raise _Unknown  # it is to be continued
    if kind == "function_call":
        call = _call(item["call_id"], item["name"], item["arguments"])
        if last is not None:
            last.setdefault("tool_calls", []).append(call)
        else:
            messages.append({"role": "assistant", "tool_calls": [call]})
    elif kind == "function_call_output":
        result = {"role": "tool", "tool_call_id": item["call_id"]}
        messages.append({**result, "content": _text(item["output"])})
    elif kind == "reasoning":
        said = item.get("content") or item["summary"]
        _join(messages, last, "reasoning", said[0]["text"] if said else "")
    elif kind == "message" and item["role"] == "assistant":
        content = item["content"]
        text = content if isinstance(content, str) else content[0]["text"]
        _join(messages, last, "content", text)
    elif kind == "message":
        messages.append({"role": item["role"], "content": _text(item["content"])})
    else:
        raise _Unknown


def _join(
    messages: list[dict[str, Any]], last: dict[str, Any] | None, name: str, text: str
) -> None:
    if last is not None and last.get(name) is None:
        last[name] = text
    else:
        messages.append({"role": "assistant", name: text})


def _text(content: object) -> object:
    """Parts of text under the name that chats have for them."""
    if isinstance(content, str):
        return content
    parts = _list(content)
    if any(part["type"] not in ("input_text", "text") for part in parts):
        raise _Unknown
    return [{"type": "text", "text": part["text"]} for part in parts]


# ---- both -----------------------------------------------------------------------------------------


def _tool(tool: Mapping[str, Any], schema: str) -> dict[str, Any]:
    function = {"name": tool["name"], "description": tool.get("description")}
    function |= {"parameters": tool.get(schema), "strict": tool.get("strict")}
    return {"type": "function", "function": function}


def _call(ident: str, name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": ident, "type": "function", "function": function}


def _list(value: object) -> Sequence[Any]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise _Unknown
    return value
