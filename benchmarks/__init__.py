"""One file per question: `python -m benchmarks.NAME [--quick] [--json]`."""
