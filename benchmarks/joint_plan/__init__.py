"""Four ways to divide four processes, predicted and measured: pp 4, pp 2 × dp 2, dp 4, pp 2 × tp 2."""
