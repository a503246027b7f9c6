"""Names of the metrics that views, plots and summaries look for in a step's line."""

REWARD = "reward/avg_raw_reward"
ACCURACY = "eval/all/avg_score"
GREEDY = "eval/all/greedy_score"
TOKENS_PER_SECOND = "generate/tokens_per_second"
STEP_SECONDS = "timing/step"
STAGES = ("generate", "score", "update", "sync", "checkpoint", "evaluate")
"""The stages of a step in their order; `timing/<stage>` is the seconds one took."""
