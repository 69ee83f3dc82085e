"""`tvb learn`: merges by what the task models, or the merged one, show on data.

data        files of examples to tokens
batches     which examples a basis learns from, side by side; losses
models      the models of the tasks, one at a time, and the bases
statistics  Fisher information and X^T X of one model
moving      theta as a function of coefficients or masks, and their gradients
descent     epochs, a held-out loss, the best that was seen
kept        files of what is learned
merging     the bases, and what was learned of them, to merged tensors
running     all of it in order, and its bill
visits      the work of `fisher` and `regmean`
descents    the work of `localize`, `adamerging` and `atlas`
"""
