"""`tvb learn`: merges that learn from examples of the tasks.

running         the request, the costs, learning, the merged model, in this order
request         a method with its options
work            the frame of all methods: data, costs, finished files
fisher_regmean  Fisher merging and RegMean, by statistics of each task's model
gradients       the common part of the methods by gradients
localize        Localize-and-Stitch: a mask of each basis
coefficients    AdaMerging and aTLAS: coefficients of the bases
statistics      Fisher information and X^T X of one model
descent         epochs, a held-out loss, the best epoch
moving          theta as a function of coefficients or masks
models          the models of the tasks, one at a time
mixtures        the weights of the tasks' data in each basis
batches         the choice of examples; batches and losses
data            files of examples to tokens
kept            files of statistics, masks and coefficients
"""
