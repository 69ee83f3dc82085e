"""A study on a real language model: fine-tuned models of SmolLM2-135M-Instruct on public data.

tasks     the data sets, their splits and their metrics
model     examples as tokens, loss, exact match in one pass, greedy answers
train     the command that trains a specialist for each task, seed and kind
run       a base and its specialists, and the score of any weights
merges, learned, stores, forgetting, online, theory     what is measured
plan      which cells are measured
cells     a file for each cell, and all of them in `cells.jsonl`
tables    cells -> the tables and the picture of evals/RESULTS.md
study     the command that measures and reports
"""
