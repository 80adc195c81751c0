"""Speed and memory against other libraries: `python -m benchmarks --help`, docs/benchmarks.md."""
