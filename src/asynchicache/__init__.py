"""An asyncio-native hierarchical cache for what hybrid language models have already computed.

The public names; each is imported when it is first used, so that `import asynchicache` pulls in nothing.
"""

from importlib import import_module
from importlib.util import find_spec

_STUB = __loader__.get_data(f"{__file__}i").decode()
_HOMES = {line.split()[3]: line.split()[1] for line in _STUB.splitlines() if line.startswith("from ")}
_NEED_TRANSFORMERS = {name for name, home in _HOMES.items() if ".integrations.transformers." in home}

__all__ = sorted(_HOMES.keys() - _NEED_TRANSFORMERS)  # a star import must not need the extra `transformers`


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *(_NEED_TRANSFORMERS if find_spec("transformers") else ())})


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'asynchicache' has no attribute {name!r}")
    try:
        return getattr(import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        if name in _NEED_TRANSFORMERS:
            message = f"{name} needs {error.name}: pip install 'asynchicache[transformers]'"
            raise ModuleNotFoundError(message, name=error.name) from error
        raise
