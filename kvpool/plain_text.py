"""Text of others, for terminals and logs.

Tenants choose the fields of namespaces, engines their names, and peers the texts of their errors. An escape sequence
in one of them could change what an operator sees, or make the terminal do things; marks of direction could show
text in another order than it has.
"""

from __future__ import annotations

import re

# All but tab and newline, with the C1 controls, which some terminals take for escapes; and marks of direction.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def plain(text: str) -> str:
    """The text with each such character replaced by U+FFFD, which shows that something was there."""
    return _UNSAFE.sub("\ufffd", text)
