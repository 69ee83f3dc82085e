"""`tvb tune`: the coefficient of a merge, found by moving one model in memory along a line.

harness     lm-eval: its tasks, the items that choose, a model and its scores
objective   scores to one number: means, shares of a reference, standard errors
search      grid, golden section, one coefficient for each basis, the rule of negation
line        theta_0 and the direction, and the tensors that move along it
model       what lm-eval scores at any point: moved, or merged anew
record      what was scored, kept point by point
report      tables, the curve, files
running     all of it in order
"""
