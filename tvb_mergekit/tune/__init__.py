"""`tvb tune`: the coefficient of a merge, found by moving one model in memory along a line.

harness     lm-eval: its tasks, the items that choose, a model and its scores
objective   one number from scores: means, shares of a reference, standard errors
search      grid, golden section, the rule of negation
merges      a recipe at any coefficient, and the line of its merges
model       the scored model at any point: moved along the line, or merged again
record      the scores, on the disk point by point
running     the command, step by step
report      tables, the curve, files
"""
