"""What a page holds as JSON: charts, figures and columns of numbers, and the text that they become in it."""

import json
from typing import TypeAlias

Json: TypeAlias = dict[str, object]


def as_json(value: object) -> str:
    """JSON that may stand inside a <script> element: nothing in it can end the element or begin another.

    >>> as_json({"recipe": "</script>&"})
    '{"recipe":"\\\\u003c/script\\\\u003e\\\\u0026"}'
    """
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)  # ASCII: U+2028 and U+2029 are escaped, too
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
