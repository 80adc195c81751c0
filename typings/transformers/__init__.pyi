# Its own `__init__` imports every model for a type checker: 2,700 files, a third of the time that pyright takes.
# Nothing is said of its names here; what experiments do with them is run by their tests.
from typing import Any

def __getattr__(name: str) -> Any: ...
