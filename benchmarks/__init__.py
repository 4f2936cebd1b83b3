"""One file a question: `python -m benchmarks.NAME [--quick] [--json]`."""
