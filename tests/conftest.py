"""For all tests: Python's collector of cycles looks less often.

Tracing makes hundreds of thousands of small objects, and each look goes through all that torch and sympy keep.
"""

import gc


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # what is imported by now stays
    gc.set_threshold(50_000, 20, 20)
