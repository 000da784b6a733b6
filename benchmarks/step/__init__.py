"""One training step on two cores: pipegraph compared with its peers at their best and with a limit.

python -m benchmarks.step

    models ─▶ contenders, peers ─▶ entries ─▶ bench: checks, cuts, rounds ─▶ rank ─▶ results ─▶ tables, kept.json
              stopwatch ─▶ account_steps, account: where the time beyond the limit goes ─┘
"""
