"""A benchmark on a real language model: fine-tuned models of SmolLM2-135M-Instruct on real data.

tasks     the data sets, their splits and their metrics
model     examples as tokens, batches, loss and exact match
train     a specialist per task, seed and kind
"""
