# sklearn has few types, and pyright takes seconds to infer the others from its code. What is done with it is run by
# tests.
from typing import Any

def __getattr__(name: str) -> Any: ...
