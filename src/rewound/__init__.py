"""rewound prunes neural networks and gets their accuracy back.

The method is that of "Comparing Rewinding and Fine-tuning in Neural Network Pruning" (Renda, Frankle, Carbin, 2020):
one function, `Train^t(W, m, g)` (`train`), a table of techniques (`TECHNIQUES`), one statement of the algorithm
(`levels`), and a store in which no result is computed twice.
"""

from importlib import import_module
from importlib.util import find_spec
from random import getstate, setstate
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from rewound.public import *  # noqa: F403
else:

    def __getattr__(name: str) -> object:
        """A public name, which is imported when it is first asked for: a report on tables needs no torch (PEP 562)."""
        # Python asks here for what `from rewound import store` names, too, before it looks for such a module.
        if name == "__all__" or not (name.startswith("_") or find_spec(f"rewound.{name}")):
            before = getstate()
            public = import_module("rewound.public")
            setstate(before)  # a library draws from Python's generator as it is imported
            if hasattr(public, name):
                return globals().setdefault(name, getattr(public, name))
        raise AttributeError(f"module 'rewound' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return [*globals(), *import_module("rewound.public").__all__]
