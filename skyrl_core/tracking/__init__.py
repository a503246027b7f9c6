"""Metrics of a run: tracker backends, metrics.jsonl, plots, and the summary. Import the submodules directly."""
