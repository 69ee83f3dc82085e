"""`tvb tune`: the coefficient of a merge, found by moving one model in memory along a line.

harness     lm-eval: its tasks, the items that choose, a model and its scores
objective   scores to one number: means, shares of a reference, standard errors
search      grid, golden section, the rule of negation
merges      a recipe at any coefficient, and the line that its merges lie on
model       what lm-eval scores at any point: moved along the line, or merged anew
record      what was scored, on the disk point by point
running     all of it in order
report      tables, the curve, files
"""
