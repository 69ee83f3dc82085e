"""`tvb learn`: merges by what the task models show on data.

data        files of examples to tokens
statistics  Fisher information and X^T X of one model; the files that hold them
models      the models of the tasks, one at a time
merging     the bases and the statistics to merged tensors
running     all of it in order, and its bill
"""
