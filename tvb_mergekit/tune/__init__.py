"""`tvb tune`: the coefficient of a merge, found by moving one model in memory along a line."""
